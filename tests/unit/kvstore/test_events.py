"""The event log of a pool: numbers, keys, bounds."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvstore.content_keys import prefix_keys, split_keys
from kvstore.errors import EventsTooOld, InvalidRequest, PoolNotAttached
from kvstore.events import (
    BLOCKS_PER_EVENT,
    BlocksEvicted,
    BlocksStored,
    EvictionCause,
    PoolCleared,
)
from kvstore.types import CommitPlan, ExtendPlan


@pytest.fixture
def run(plan):
    """Open a sequence, compute its prompt, close it."""

    def run(manager, sequence_id: str, length: int, first: int = 0):
        manager.open_sequences([plan(sequence_id, length, first)])
        manager.commit_blocks([CommitPlan(sequence_id, length)])
        manager.close_sequences([sequence_id])

    return run


def start(manager):
    """The log, turned on and complete."""
    log = manager.events()
    log.start()
    while log.is_filling:
        log.advance()
    return log


def drain(log, after: int = 0):
    while log.advance():
        pass
    return log.read(after, 1 << 20)


def keys_of(snapshot) -> set[bytes]:
    return set(split_keys(snapshot.keys.tobytes()))


def test_events_name_the_keys_of_a_prompt(managers, plan, run):
    manager = managers(4)
    log = start(manager)
    run(manager, "a", 17)
    (stored,) = drain(log)
    expected = prefix_keys(plan("a", 17).namespace, range(17), 8)
    assert (stored.number, split_keys(stored.keys)) == (1, expected)
    assert len(stored.block_ids) == 2


def test_blocks_that_a_request_generated_are_named_like_its_prompt(managers, plan):
    manager = managers(8)
    log = start(manager)
    manager.open_sequences([plan("a", 10)])
    manager.commit_blocks([CommitPlan("a", 10)])
    for length in range(11, 26):
        manager.extend_sequences([ExtendPlan("a", length)])
        manager.commit_blocks([CommitPlan("a", length, length - 1, [length - 1])])
    events = drain(log)
    keys = [key for event in events for key in split_keys(event.keys)]
    assert keys == prefix_keys(plan("a", 25).namespace, range(25), 8)
    assert [event.number for event in events] == [1, 2, 3]
    assert [event.parent_key for event in events[1:]] == keys[:2]


def test_a_branch_is_stored_below_the_block_before_it(managers, plan, run):
    manager = managers(8)
    log = start(manager)
    run(manager, "a", 24)
    manager.open_sequences([plan("b", 17)])
    manager.extend_sequences([ExtendPlan("b", 25)])
    manager.commit_blocks([CommitPlan("b", 24, 17, [99] * 7)])
    branch = drain(log)[-1]
    expected = prefix_keys(plan("b", 17).namespace, [*range(17), *[99] * 7], 8)
    assert [branch.parent_key, *split_keys(branch.keys)] == expected[1:]


def test_a_log_that_is_off_counts_and_keeps_nothing(managers, run):
    manager = managers(4)
    log = manager.events()
    run(manager, "a", 16)
    run(manager, "b", 32, 100)
    assert log.number == 3  # a stored, a evicted, b stored
    assert not log.advance()
    assert log.read(3, 10) == []
    with pytest.raises(EventsTooOld):
        log.read(2, 10)


def test_a_log_that_starts_late_knows_what_was_there_before(managers, plan, run):
    manager = managers(8)
    run(manager, "a", 16)
    manager.open_sequences([plan("b", 33)])  # shares a block, is not computed yet
    log = manager.events()
    log.start()
    assert log.is_filling
    while log.is_filling:
        log.advance()
    expected = prefix_keys(plan("b", 33).namespace, range(33), 8)
    before = log.snapshot()
    assert (before.number, keys_of(before)) == (1, set(expected[:2]))
    manager.commit_blocks([CommitPlan("b", 32)])
    (stored,) = drain(log, before.number)
    assert split_keys(stored.keys) == expected[2:]
    after = log.snapshot(with_tokens=True)
    assert (after.number, keys_of(after)) == (2, set(expected))
    rows = {key: i for i, key in enumerate(split_keys(after.keys.tobytes()))}
    for index, key in enumerate(expected):
        tokens = list(range(8 * index, 8 * index + 8))
        assert after.tokens[rows[key]].tolist() == tokens
    for parent, key in pairwise(expected):
        assert after.parent_keys[rows[key]].tobytes() == parent


def test_what_stays_of_a_run_that_is_split_and_evicted_meanwhile_is_not_missed(managers, plan, run):
    """The walk through the tree had only the whole run on its list."""
    manager = managers(6)
    run(manager, "a", 32)
    log = manager.events()
    log.start()
    manager.open_sequences([plan("b", 9)])  # holds the first of four blocks
    manager.open_sequences([plan("c", 32, 100)])  # takes the place of two others
    while log.is_filling:
        log.advance(1)
    keys = prefix_keys(plan("a", 32).namespace, range(32), 8)
    found = keys_of(log.snapshot())
    assert keys[0] in found
    assert len(found) == len(log.snapshot().keys) == 4 - manager.stats().num_evictions
    assert found <= set(keys)


def test_evicted_blocks_are_named_with_the_cause(managers, plan):
    """b continues below blocks of the same prefix that a had computed first."""
    manager = managers(7)
    log = start(manager)
    manager.open_sequences([plan("a", 16), plan("b", 24)])
    manager.commit_blocks([CommitPlan("a", 16)])
    manager.commit_blocks([CommitPlan("b", 24)])
    manager.close_sequences(["a"])
    manager.open_sequences([plan("c", 32, 100)])
    first, below, pruned, room = drain(log)
    keys = prefix_keys(plan("b", 24).namespace, range(24), 8)
    assert split_keys(first.keys) + split_keys(below.keys) == keys
    assert below.parent_key == keys[1]
    assert (split_keys(pruned.keys), pruned.cause) == (keys[2:], EvictionCause.PREFIX)
    assert set(split_keys(room.keys)) <= set(keys[:2])
    assert room.cause is EvictionCause.ROOM
    assert manager.audit() == []


def test_a_long_run_makes_several_events(managers, plan, run):
    num_blocks = 2 * BLOCKS_PER_EVENT + 1
    manager = managers(num_blocks)
    log = start(manager)
    run(manager, "a", num_blocks * 8)
    assert log.number == 3
    assert log.advance()
    assert len(log.read(0, 10)) == 1  # in pieces, so that no call takes long
    assert len(keys_of(log.snapshot())) == BLOCKS_PER_EVENT
    events = drain(log)
    assert [event.number for event in events] == [1, 2, 3]
    keys = [key for event in events for key in split_keys(event.keys)]
    assert keys == prefix_keys(plan("a", 1).namespace, range(num_blocks * 8), 8)
    assert events[1].parent_key == keys[BLOCKS_PER_EVENT - 1]
    run(manager, "b", num_blocks * 8, 10**6)
    evicted = drain(log, 3)[:3]
    assert [type(event) for event in evicted] == [BlocksEvicted] * 3
    assert {key for event in evicted for key in split_keys(event.keys)} == set(keys)
    assert len(drain(log, 6)) == 3


def test_full_buffers_forget_the_oldest_events(managers, run):
    manager = managers(4)
    log = manager.events()
    log.capacity = 40  # four events of a block or two
    log.start()
    for index in range(10):
        run(manager, f"{index}", 16, 100 * index)
        drain(log, log.number)
    assert log.number == 18
    with pytest.raises(EventsTooOld) as caught:
        log.read(10, 100)
    oldest = int(caught.value.metadata["oldest_number"])
    assert [event.number for event in log.read(oldest - 1, 100)] == list(range(oldest, 19))
    assert 10 < oldest < 18


def test_a_log_that_nobody_advances_turns_itself_off(managers, run):
    manager = managers(4)
    log = manager.events()
    log.capacity = 40
    log.start()
    for index in range(10):
        run(manager, f"{index}", 16, 100 * index)
    assert not log.advance()
    with pytest.raises(EventsTooOld):
        log.read(0, 100)
    with pytest.raises(EventsTooOld):
        log.snapshot()
    snapshot = start(manager).snapshot()
    assert (snapshot.number, len(snapshot.keys)) == (18, 4)
    run(manager, "again", 16, 5000)
    assert [event.number for event in drain(log, 18)] == [19, 20]


def test_the_weight_of_the_buffers_is_that_of_their_events(managers, run):
    """Whatever was split, forgotten or turned off."""
    manager = managers(3 * BLOCKS_PER_EVENT)
    log = manager.events()
    log.capacity = 5 * BLOCKS_PER_EVENT
    log.start()
    for index in range(8):
        run(manager, f"{index}", (2 * BLOCKS_PER_EVENT + index) * 8, 10**6 * index)
        events = drain(log, log.number) or list(log._events)
        assert log._weight == sum(len(event.keys) // 32 + 8 for event in events)
        assert log._weight <= log.capacity


def test_a_number_from_the_future_is_refused(managers, run):
    manager = managers(4)
    run(manager, "a", 16)
    log = manager.events()
    for after in (2, -1):
        with pytest.raises(InvalidRequest, match="after_number"):
            log.read(after, 10)


def test_every_pool_has_an_epoch_of_its_own(managers, shape):
    epochs = {managers(4).events().epoch for _ in range(50)}
    assert len(epochs) == 50
    assert 0 not in epochs


def test_a_pool_that_ends_is_cleared_for_its_watchers(managers, run):
    manager = managers(4)
    log = start(manager)
    woken = []
    log.wakers.add(lambda: woken.append(1))
    run(manager, "a", 16)
    stored, *_ = drain(log)
    assert isinstance(stored, BlocksStored)
    assert len(woken) == 1
    manager.close()
    assert drain(log, 1) == [PoolCleared(2)]
    assert log.is_closed
    assert len(log.snapshot().keys) == 0
    assert len(woken) > 1
    with pytest.raises(PoolNotAttached):
        manager.events()
