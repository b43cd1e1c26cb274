"""A manager that is killed anywhere leaves a pool that the next one goes on with."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from kvstore.kill_points import KILL_POINTS
from kvstore.manager import PageManager
from kvstore.types import (
    CommitPlan,
    ExtendPlan,
    ForkPlan,
    OpenPlan,
    SuspendMode,
    SuspendPlan,
    Update,
)
from tests.unit.kvstore.crash_script import NUM_STEPS, OPTIONS, OURS, THEIRS, Script
from tests.unit.kvstore.crashing import Killed, copy_of


def undisturbed():
    """What can be seen before each step and after the last one; the kill points of each."""
    script = Script()
    seen, points = [script.seen()], []
    for number in range(NUM_STEPS):
        script.fuse.light()
        script.run(number)
        points.append(script.fuse.points)
        seen.append(script.seen())
    return seen, points


SEEN, POINTS = undisturbed()


def killed_at(step: int, count: int) -> Script:
    """A script whose manager died in this step, at the kill point of this number."""
    script = Script()
    for number in range(step):
        script.run(number)
    script.fuse.light(count)
    with pytest.raises(Killed):
        script.run(step)
    script.fuse.light()
    return script


DEATHS = [
    pytest.param(step, at + 1, id=f"step {step}, {at + 1}: {point}")
    for step, points in enumerate(POINTS)
    for at, point in enumerate(points)
]


def test_the_script_reaches_every_kill_point():
    assert {point for points in POINTS for point in points} == set(KILL_POINTS)


@pytest.mark.parametrize(("step", "count"), DEATHS)
def test_the_next_manager_finds_what_was_there_before_or_after_the_call(step, count):
    script = killed_at(step, count)
    script.start()
    assert script.manager.audit() == []
    (before, pins_before), (after, pins_after) = SEEN[step], SEEN[step + 1]
    sequences, pins = script.seen()
    for sequence_id in {*before, *after, *sequences}:
        present = sequences.get(sequence_id)
        assert present in (before.get(sequence_id), after.get(sequence_id))
    assert pins in (pins_before, pins_after)


@pytest.mark.parametrize(("step", "count"), DEATHS)
def test_the_killed_call_can_be_repeated_and_the_rest_goes_on(step, count):
    script = killed_at(step, count)
    script.start()
    script.run(0)  # a pool whose making was cut short is made again
    script.run_again(step)
    assert without_places(script.seen()) == without_places(SEEN[step + 1])
    for number in range(step + 1, NUM_STEPS):
        script.run(number)
        assert script.manager.audit() == []
        assert without_places(script.seen()) == without_places(SEEN[number + 1])
    stats = script.manager.stats()
    assert (stats.num_held, stats.num_sequences) == (0, 0)


def without_places(seen):
    """What a caller has a right to; where KV is, and how much there still is, may differ."""
    sequences, pins = seen
    return (
        {
            key: replace(one, block_ids=len(one.block_ids), num_computed_tokens=0)
            for key, one in sequences.items()
        },
        [replace(pin, num_cached_tokens=0) for pin in pins],
    )


@pytest.mark.parametrize(("step", "count"), DEATHS)
def test_a_recovery_that_is_killed_itself_changes_nothing(step, count):
    script = killed_at(step, count)
    left = copy_of(script.storage)
    script.start()
    expected, num_points = script.seen(), len(script.fuse.points)
    for at in range(num_points):
        script.storage = copy_of(left)
        script.fuse.light(at + 1)
        with pytest.raises(Killed):
            script.start()
        script.fuse.light()
        script.start()
        assert script.manager.audit() == []
        assert script.seen() == expected


def test_a_manager_that_leaves_and_one_that_is_killed_leave_the_same():
    script = Script()
    for number in range(20):
        script.run(number)
    seen = script.seen()
    script.manager.leave()
    script.start()
    assert script.seen() == seen


def test_the_epoch_outlives_the_manager_and_older_ones_stay_refused():
    script = Script()
    script.run(0)
    script.run(1)
    old = script.epoch
    script.run(1)
    script.start()
    plan = OpenPlan("a", range(9), OURS)
    with pytest.raises(Exception, match="another driver"):
        script.manager.open_sequences([plan], old)
    script.manager.open_sequences([plan], script.epoch)
    assert script.manager.acquire_driver_lease()[0] > script.epoch


def test_transfers_of_an_earlier_manager_say_nothing_of_the_next_ones_copies():
    """A driver that outlives a kvstore may complete what it has run for it."""
    script = Script()
    script.run(0)
    script.transfer = 0
    for name, first in (("b", 0), ("a", 100)):
        plan = OpenPlan(name, range(first, first + 17), OURS)
        script.manager.open_sequences([plan], script.epoch)
        script.manager.commit_blocks([CommitPlan(name, 17)], script.epoch)
    script.suspend()
    run_before = script.transfer
    script.start()
    plan = SuspendPlan("a", SuspendMode.SWAP)
    _, copies, transfer = script.manager.suspend_sequences([plan], runs_copies=True)
    assert copies
    script.manager.complete_transfer(run_before, 0.0)
    asks = OpenPlan("asks", range(100, 117), OURS)
    result = script.manager.update(Update(opens=[asks], runs_copies=True))
    assert result.opened[0].num_cached_tokens == 0, "the copies were not run yet"
    script.manager.close_sequences(["asks"])
    script.manager.complete_transfer(transfer, 0.0)
    result = script.manager.update(Update(opens=[asks], runs_copies=True))
    assert result.opened[0].num_cached_tokens == 16


def test_a_copy_whose_answer_was_lost_is_not_taken_for_made():
    """Whoever lists the sequences after a crash computes again what was to be copied."""
    script = Script()
    script.run(0)
    script.manager.open_sequences([OpenPlan("a", range(12), OURS)])
    script.manager.commit_blocks([CommitPlan("a", 12)])
    script.manager.fork_sequences([ForkPlan("a", "b")])
    [grown] = script.manager.extend_sequences([ExtendPlan("b", 13)])
    assert grown.copied_from is not None
    script.start()
    sequences, _ = script.seen()
    assert sequences["b"].block_ids[1:] == grown.block_ids
    assert sequences["b"].num_computed_tokens == 8
    assert sequences["a"].num_computed_tokens == 12
    script.manager.commit_blocks([CommitPlan("b", 12)])
    assert script.seen()[0]["b"].num_computed_tokens == 12


def test_a_pool_with_an_unreadable_journal_is_given_up_and_made_anew():
    script = Script()
    for number in range(4):
        script.run(number)
    script.storage.made[-1].journal.kept.append(b"\xc1")
    script.start()
    assert "given up" in script.manager.recovered
    assert not script.manager.is_attached
    script.run(0)
    assert script.manager.audit() == []
    assert script.seen() == ({}, [])


def test_a_pool_of_another_size_is_given_up():
    script = Script()
    script.run(0)
    options = replace(OPTIONS, kv_memory_bytes=2 * OPTIONS.kv_memory_bytes)
    manager = PageManager(options, script.storage)
    assert "given up" in manager.recovered
    assert manager.stats().num_blocks == 0
    assert script.storage.made[0].num_closes == 1


def test_what_was_never_committed_is_not_findable_after_a_crash():
    """Fault C5, across a crash."""
    script = Script()
    script.run(0)
    script.manager.open_sequences([OpenPlan("a", range(17), OURS)])
    script.start()
    script.manager.close_sequences(["a"])
    [again] = script.manager.open_sequences([OpenPlan("b", range(17), OURS)])
    assert again.num_cached_tokens == 0


def test_a_recovered_block_is_findable_in_its_own_namespace_only():
    """Fault C1 and C3, across a crash."""
    script = Script()
    script.run(0)
    script.manager.open_sequences([OpenPlan("a", range(17), OURS)])
    script.manager.commit_blocks([CommitPlan("a", 17)])
    script.start()
    plans = [OpenPlan("theirs", range(17), THEIRS), OpenPlan("ours", range(17), OURS)]
    hits = [one.num_cached_tokens for one in script.manager.open_sequences(plans)]
    assert hits == [0, 16]


def test_tokens_in_the_records_are_compared_not_trusted():
    """A record that was damaged finds nothing, and gives nobody the wrong KV."""
    script = Script()
    script.run(0)
    script.manager.open_sequences([OpenPlan("a", range(17), OURS)])
    script.manager.commit_blocks([CommitPlan("a", 17)])
    script.manager.close_sequences(["a"])
    records = script.manager._attached.state.blocks.frames.records
    records.tokens[:] = array("i", range(50, 58))
    script.start()
    [asks] = script.manager.open_sequences([OpenPlan("b", range(17), OURS)])
    assert asks.num_cached_tokens == 0


def test_what_follows_a_block_that_was_given_to_somebody_else_since_is_not_found():
    """Its record names the parent with a generation, which the parent does not have any more."""
    script = Script()
    script.run(0)
    script.manager.open_sequences([OpenPlan("a", range(25), OURS)])
    script.manager.commit_blocks([CommitPlan("a", 25)])
    table = script.seen()[0]["a"].block_ids
    script.manager.close_sequences(["a"])
    script.manager._attached.state.blocks.frames.records.generations[table[1]] += 1
    script.start()
    [asks] = script.manager.open_sequences([OpenPlan("b", range(25), OURS)])
    assert asks.num_cached_tokens == 16
    assert script.manager.audit() == []


def test_what_is_in_the_host_pool_is_there_after_a_crash():
    """The blocks of a sequence that waits, its partial one too, and those that anybody finds."""
    script = Script()
    script.run(0)
    script.manager.open_sequences([OpenPlan("b", range(20), OURS)])
    script.manager.commit_blocks([CommitPlan("b", 20)])
    script.suspend()
    script.manager.complete_transfer(script.transfer, 0.0)
    script.start()
    asks = OpenPlan("asks", range(20), OURS)
    [found] = script.manager.update(Update(opens=[asks], runs_copies=True)).opened
    assert (found.num_cached_tokens, len(found.copies)) == (16, 2)
    [back], _, _ = script.manager.resume_sequences(["b"], runs_copies=True)
    assert back.num_computed_tokens == 20
    assert len(back.copies) == 3
    assert script.manager.audit() == []


def test_a_repair_that_is_killed_leaves_what_it_began_with():
    script = Script()
    for number in range(11):
        script.run(number)
    seen, left = script.seen(), copy_of(script.storage)

    def repair(light: int) -> None:
        script.storage = copy_of(left)
        script.fuse.light()
        script.start()
        records = script.manager._attached.state.blocks.frames.records
        records.ref_counts[:] += 1
        script.fuse.light(light)
        script.manager.audit(repair=True)

    repair(0)
    num_points = len(script.fuse.points)
    assert num_points
    for at in range(num_points):
        with pytest.raises(Killed):
            repair(at + 1)
        script.fuse.light()
        script.start()
        assert script.manager.audit() == []
        assert script.seen() == seen


@pytest.mark.parametrize("count", [1, 2])
def test_a_journal_that_is_written_anew_is_the_old_one_or_the_new_one(count):
    script = Script()
    for number in range(11):
        script.run(number)
    seen = script.seen()
    script.manager._attached.journal._grown = 1 << 40
    script.fuse.light(count)
    with pytest.raises(Killed, match=r"journal\.rewrite"):
        script.manager.close_sequences(["ghost"])
    script.fuse.light()
    script.start()
    assert script.manager.audit() == []
    assert script.seen() == seen
