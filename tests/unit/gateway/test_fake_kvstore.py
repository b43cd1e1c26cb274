"""What only the fake page manager has; the rest is in the contract tests."""

from __future__ import annotations

import asyncio

import pytest

from gateway.errors import PinRefused
from gateway.fakes import ContractBroken, FakeKvStore
from gateway.ports import (
    CommitPlan,
    ExtendPlan,
    ForkPlan,
    Namespace,
    OpenPlan,
    PinPlan,
    TruncatePlan,
    Update,
)

NS = Namespace(b"m")


def open_plan(sequence_id, length, first=0, group_id=""):
    return OpenPlan(sequence_id, list(range(first, first + length)), NS, group_id=group_id)


def test_blocks_that_are_freed_late_are_counted_and_cannot_be_had():
    kv = FakeKvStore(num_blocks=4, frees_late=2)
    kv.apply(Update(opens=[open_plan("a", 16)]))
    result = kv.apply(Update(suspends=["a"], extends=[ExtendPlan("a", 1)]))
    assert result.suspended[0].num_freed_blocks == 4
    assert (kv.num_free, result.num_available_blocks) == (4, 0)
    for expected in (["b"], []):
        result = kv.apply(Update(opens=[open_plan("b", 4, 100)]))
        assert [r.sequence_id for r in result.refused] == expected
    assert (kv.num_free, result.num_available_blocks) == (3, 3)


def test_a_late_block_can_be_found_and_held_at_once():
    kv = FakeKvStore(num_blocks=4, frees_late=5)
    kv.apply(Update(opens=[open_plan("a", 9)]))
    kv.apply(Update(commits=[CommitPlan("a", 9, 0, [])], closes=["a"]))
    [again] = kv.apply(Update(opens=[open_plan("b", 9)])).opened
    assert again.num_cached_tokens == 8
    assert kv.num_free == 1


def test_what_a_swap_keeps_is_there_once_its_copies_were_run():
    kv = FakeKvStore(num_blocks=6, host_blocks=4)
    table = kv.apply(Update(opens=[open_plan("a", 10)])).opened[0].block_ids
    kv.apply(Update(commits=[CommitPlan("a", 10, 0, [])]))
    result = kv.apply(Update(suspends=["a"]))
    assert [copy.source for copy in result.copies] == table
    assert result.suspended[0].is_swapped
    assert kv.num_host_free == 1
    kv.apply(Update(opens=[open_plan("big", 24, 500)]))  # whatever is cached is gone
    done = Update(completed_transfer=result.transfer, closes=["big"], resumes=["a"])
    [back] = kv.apply(done).resumed
    assert back.num_computed_tokens == 10
    assert [copy.target for copy in back.copies] == back.block_ids
    assert kv.num_host_free == 1
    kv.apply(Update(commits=[CommitPlan("a", 10, 0, [])]))
    assert kv.num_host_free == 4


def test_a_swap_whose_copies_were_not_run_brings_nothing_back():
    kv = FakeKvStore(num_blocks=6, host_blocks=4)
    kv.apply(Update(opens=[open_plan("a", 10)]))
    kv.apply(Update(commits=[CommitPlan("a", 10, 0, [])]))
    kv.apply(Update(suspends=["a"], opens=[open_plan("big", 24, 500)]))
    [back] = kv.apply(Update(closes=["big"], resumes=["a"])).resumed
    assert (back.num_computed_tokens, back.copies) == (0, [])


def test_pins_hold_their_blocks_and_give_way_when_nothing_else_could():
    kv = FakeKvStore(num_blocks=4, most_pinned=2)
    pin = PinPlan("p", "o", list(range(8)), NS, 60.0)
    other = PinPlan("q", "o", list(range(50, 58)), NS, 60.0)

    async def both():
        await kv.pin_prefix(pin)
        await kv.pin_prefix(pin)
        await kv.pin_prefix(other)

    with pytest.raises(PinRefused):
        asyncio.run(both())
    assert list(kv.pins) == ["p"]
    kv.apply(Update(opens=[open_plan("a", 8)]))
    kv.apply(Update(commits=[CommitPlan("a", 8, 0, [])], closes=["a"]))
    assert kv.num_free == 2
    result = kv.apply(Update(opens=[open_plan("b", 8, 100), open_plan("c", 4, 200)]))
    assert [one.sequence_id for one in result.opened] == ["b"]
    assert kv.pins, "others that run will make room"
    result = kv.apply(Update(closes=["b"], opens=[open_plan("d", 16, 300)]))
    assert [one.sequence_id for one in result.opened] == ["d"]
    assert not kv.pins
    asyncio.run(kv.unpin("p"))


@pytest.mark.parametrize(
    "update",
    [
        Update(),
        Update(completed_transfer=1),
        Update(opens=[open_plan("a", 4)]),
        Update(commits=[CommitPlan("a", 9, 0, [])]),
        Update(commits=[CommitPlan("a", 1, 0, [7])]),
        Update(truncates=[TruncatePlan("a", 9)]),
        Update(forks=[ForkPlan("b", "a", 9)]),
    ],
)
def test_nonsense_is_found_out(update):
    kv = FakeKvStore()
    kv.apply(Update(opens=[open_plan("a", 8)]))
    with pytest.raises(ContractBroken):
        kv.apply(update)
