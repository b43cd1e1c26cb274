"""Suspending and resuming: what is copied, what is computed again, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.errors import OutOfBlocks, SequenceNotSuspended, SequenceSuspended
from kvstore.types import (
    CommitPlan,
    ExtendPlan,
    ForkPlan,
    OpenPlan,
    SuspendMode,
    SuspendPlan,
    Update,
)

NUM_BLOCKS = 20
AUTO, SWAP, RECOMPUTE = SuspendMode.AUTO, SuspendMode.SWAP, SuspendMode.RECOMPUTE


@pytest.fixture
def manager(managers):
    return managers(NUM_BLOCKS, num_host_blocks=12)


@pytest.fixture
def opened(plan):
    """Open a sequence and compute all of it; its table."""

    def opened(manager, name, length, first=0, group="") -> list[int]:
        [one] = manager.open_sequences([replace(plan(name, length, first), group=group)])
        manager.commit_blocks([CommitPlan(name, length)])
        return one.block_ids

    return opened


def suspend(manager, *names, mode=AUTO, runs_copies=True):
    plans = [SuspendPlan(name, mode) for name in names]
    return manager.suspend_sequences(plans, runs_copies=runs_copies)


def test_a_swapped_sequence_waits_in_the_host_pool_and_comes_back_whole(manager, opened):
    table = opened(manager, "a", 20)
    [answer], copies, transfer = suspend(manager, "a", mode=SWAP)
    assert (answer.mode, answer.reason, answer.num_copied_blocks) == (SWAP, "asked for", 3)
    assert sorted(copy.source for copy in copies) == sorted(table)
    assert all(copy.target >= NUM_BLOCKS for copy in copies)
    where = {copy.source: copy.target for copy in copies}
    manager.complete_transfer(transfer, 0.001)
    assert manager.stats().num_held == 0
    [back], first, _ = manager.resume_sequences(["a"], runs_copies=True)
    assert (back.length, back.num_computed_tokens, first) == (20, 20, [])
    pairs = zip(table, back.block_ids, strict=True)
    assert back.copies == [(where[old], new) for old, new in pairs]
    manager.commit_blocks([CommitPlan("a", 20)])
    stats = manager.stats()
    assert stats.num_host_free == stats.num_host_blocks


def test_what_another_takes_along_to_the_host_pool_its_twin_puts_back(manager, plan):
    """Both computed the same prompt; the tree had one's blocks, which now leave."""
    manager.open_sequences([plan("a", 16), plan("b", 16)])
    manager.commit_blocks([CommitPlan("a", 16), CommitPlan("b", 16)])
    manager.extend_sequences([ExtendPlan("b", 32)])
    [answer], _, transfer = suspend(manager, "a", mode=SWAP)
    assert answer.num_copied_blocks == 2
    manager.complete_transfer(transfer, 0.001)
    manager.commit_blocks([CommitPlan("b", 24, 16, tuple(range(500, 508)))])
    assert manager.audit() == []
    stats = manager.stats()
    assert stats.num_host_cached == 0
    [again] = manager.open_sequences([plan("c", 17)])
    assert again.num_cached_tokens == 16


def test_the_cheaper_way_is_taken_and_the_answer_says_what_both_cost(manager, opened):
    opened(manager, "a", 24)
    opened(manager, "b", 24, 1000)
    [answer], copies, _ = suspend(manager, "a")
    assert answer.mode is SWAP
    assert answer.swap_seconds < answer.recompute_seconds
    assert "swap takes" in answer.reason
    assert len(copies) == 3
    manager.observe_prefill(10**12, 1.0)
    [answer], copies, _ = suspend(manager, "b")
    assert answer.mode is RECOMPUTE
    assert answer.swap_seconds > answer.recompute_seconds
    assert copies == []


def test_measured_copies_change_the_decision(manager, opened):
    opened(manager, "a", 24)
    _, _, transfer = suspend(manager, "a", mode=SWAP)
    manager.complete_transfer(transfer, 3600.0)
    opened(manager, "b", 24, 1000)
    [answer], _, _ = suspend(manager, "b")
    assert answer.mode is RECOMPUTE


def test_blocks_that_others_hold_are_not_copied_and_stay(manager, opened, plan):
    table = opened(manager, "a", 24)
    opened(manager, "b", 20)
    [answer], copies, _ = suspend(manager, "b", mode=SWAP)
    assert answer.num_copied_blocks == len(copies) == 1  # the block that is not full
    assert manager.list_sequences()[0][0].block_ids == table
    [back], _, _ = manager.resume_sequences(["b"], runs_copies=True)
    assert back.block_ids[:2] == table[:2]
    # Its tail has not arrived in the host pool yet; the other one's block begins alike.
    assert back.copies == [(table[2], back.block_ids[2])]
    assert back.num_computed_tokens == 20


def test_a_recomputed_sequence_finds_what_is_still_cached(manager, opened):
    table = opened(manager, "a", 20)
    [answer], copies, transfer = suspend(manager, "a", mode=RECOMPUTE)
    assert (answer.mode, answer.reason, copies, transfer) == (RECOMPUTE, "asked for", [], 0)
    before = manager.stats()
    assert (before.num_held, before.num_cached) == (0, 2)
    [back], _, _ = manager.resume_sequences(["a"])
    assert (back.block_ids[:2], back.num_computed_tokens) == (table[:2], 16)
    after = manager.stats()
    assert (after.num_prompt_tokens, after.num_hit_tokens) == (20, 0), "no hit: it was its own"


def test_what_was_not_computed_yet_is_not_copied(manager, plan):
    manager.open_sequences([plan("a", 40)])
    manager.commit_blocks([CommitPlan("a", 12)])
    [answer], copies, _ = suspend(manager, "a", mode=SWAP)
    assert answer.num_copied_blocks == len(copies) == 2
    [back], _, _ = manager.resume_sequences(["a"], runs_copies=True)
    assert (back.length, len(back.block_ids)) == (40, 5)


@pytest.mark.parametrize(
    ("runs_copies", "num_host_blocks", "words"),
    [(False, 12, "runs no copies"), (True, 0, "no host pool"), (True, 2, "no room for 3")],
)
def test_a_swap_that_cannot_be_is_a_recompute_and_says_why(
    managers, opened, runs_copies, num_host_blocks, words
):
    manager = managers(NUM_BLOCKS, num_host_blocks=num_host_blocks)
    opened(manager, "a", 24)
    [answer], copies, transfer = suspend(manager, "a", mode=SWAP, runs_copies=runs_copies)
    assert answer.mode is RECOMPUTE
    assert words in answer.reason
    assert (copies, transfer) == ([], 0)


def test_a_group_goes_and_comes_back_whole(manager, opened):
    for number, name in enumerate(("a", "b", "c")):
        opened(manager, name, 12, 1000 * number, "beams")
    opened(manager, "other", 12, 5000)
    answers, _, _ = suspend(manager, "b")
    assert [answer.sequence_id for answer in answers] == ["a", "b", "c"]
    infos = {info.sequence_id: info.is_suspended for info in manager.list_sequences()[0]}
    assert infos == {"a": True, "b": True, "c": True, "other": False}
    resumed, _, _ = manager.resume_sequences(["c"])
    assert [one.sequence_id for one in resumed] == ["a", "b", "c"]


def test_a_group_that_does_not_fit_stays_away_whole(manager, opened, plan):
    for number, name in enumerate(("a", "b")):
        opened(manager, name, 40, 1000 * number, "pair")
    suspend(manager, "a", mode=RECOMPUTE)
    manager.open_sequences([plan("big", 12 * 8, 9000)])
    before = manager.stats(), manager.list_sequences()
    with pytest.raises(OutOfBlocks):
        manager.resume_sequences(["a"])
    assert (manager.stats(), manager.list_sequences()) == before
    manager.close_sequences(["big"])
    resumed, _, _ = manager.resume_sequences(["a"])
    assert len(resumed) == 2


def test_what_a_group_shares_is_copied_once_and_shared_again(manager, opened):
    table = opened(manager, "a", 20, 0, "samples")
    manager.fork_sequences([ForkPlan("a", "b"), ForkPlan("a", "c")])
    answers, copies, transfer = suspend(manager, "a", mode=SWAP)
    assert len(answers) == 3
    full = [copy for copy in copies if copy.source in table[:2]]
    assert len(full) == 2
    assert len(copies) == 2 + 3  # and of the partial one, each its own
    manager.complete_transfer(transfer, 0.001)
    resumed, _, _ = manager.resume_sequences(["a"], runs_copies=True)
    assert all(one.num_computed_tokens == 20 for one in resumed)


def test_a_suspended_sequence_can_only_be_resumed_or_closed(manager, opened):
    opened(manager, "a", 20)
    suspend(manager, "a", mode=SWAP)
    before = manager.stats(), manager.list_sequences()
    for call, plan in (
        (manager.extend_sequences, ExtendPlan("a", 30)),
        (manager.commit_blocks, CommitPlan("a", 20)),
        (manager.fork_sequences, ForkPlan("a", "b")),
        (manager.suspend_sequences, SuspendPlan("a")),
    ):
        with pytest.raises(SequenceSuspended):
            call([plan])
    assert (manager.stats(), manager.list_sequences()) == before
    manager.close_sequences(["a"])
    stats = manager.stats()
    assert stats.num_sequences == stats.num_held == 0


def test_what_is_not_suspended_cannot_be_resumed(manager, opened):
    opened(manager, "a", 20)
    with pytest.raises(SequenceNotSuspended):
        manager.resume_sequences(["a"])


def test_cancelling_amid_a_swap_leaves_no_block_behind(manager, opened):
    """Fault S4."""
    for number in range(100):
        opened(manager, "a", 20, number * 1000)
        _, _, transfer = suspend(manager, "a", mode=SWAP)
        if number % 3 == 1:
            manager.complete_transfer(transfer, 0.001)
        if number % 2:
            manager.resume_sequences(["a"], runs_copies=True)
        manager.close_sequences(["a"])
        if number % 3 == 2:
            manager.complete_transfer(transfer, 0.001)
    manager.acquire_driver_lease()
    stats = manager.stats()
    assert stats.num_held == 0
    assert stats.num_host_free + stats.num_host_cached == stats.num_host_blocks


def test_evicted_blocks_wait_in_the_host_pool_and_are_copied_back_on_a_hit(manager, opened, plan):
    opened(manager, "a", 40)
    manager.close_sequences(["a"])
    result = manager.update(Update(opens=[plan("big", NUM_BLOCKS * 8, 5000)], runs_copies=True))
    assert len(result.copies) == manager.stats().num_demotions == 5
    assert manager.stats().num_evictions == 0
    manager.complete_transfer(result.transfer, 0.001)
    manager.close_sequences(["big"])
    result = manager.update(Update(opens=[plan("again", 41)], runs_copies=True))
    [again] = result.opened
    assert again.num_cached_tokens == 40
    assert [copy.target for copy in again.copies] == again.block_ids[:5]
    assert result.transfer > 0


def test_a_caller_that_runs_no_copies_gets_none(manager, opened, plan):
    opened(manager, "a", 40)
    manager.close_sequences(["a"])
    manager.open_sequences([plan("big", NUM_BLOCKS * 8, 5000)])
    stats = manager.stats()
    assert (stats.num_demotions, stats.num_evictions) == (0, 5)


def test_predictions_and_what_came_of_them_are_counted(manager, opened):
    opened(manager, "a", 24)
    opened(manager, "b", 24, 1000)
    [swapped], _, transfer = suspend(manager, "a", mode=SWAP)
    manager.complete_transfer(transfer, 0.25)
    [dropped], _, _ = suspend(manager, "b", mode=RECOMPUTE)
    swap = manager.stats().swap
    assert (swap.num_swaps, swap.num_recomputes) == (1, 1)
    assert swap.swap_predicted_seconds == swapped.swap_seconds
    assert swap.swap_actual_seconds == 0.25
    assert swap.recompute_predicted_seconds == dropped.recompute_seconds
    assert swap.recompute_actual_seconds == 0.0


def test_driver_state_outlasts_a_suspension(manager, plan):
    state = b"rng at 7"
    manager.open_sequences([replace(plan("a", 20), driver_state=b"")])
    manager.commit_blocks([CommitPlan("a", 20, driver_state=state)])
    suspend(manager, "a", mode=RECOMPUTE)
    manager.resume_sequences(["a"])
    [info] = manager.list_sequences(with_tokens=True)[0]
    assert (info.driver_state, info.tokens) == (state, list(range(20)))


def test_a_resumption_that_opens_anew_is_no_hit(manager, opened, plan):
    opened(manager, "a", 20)
    manager.close_sequences(["a"])
    before = manager.stats()
    again = OpenPlan("b", list(range(20)), plan("", 1).namespace, is_resumption=True)
    [opened_again] = manager.open_sequences([again])
    assert opened_again.num_cached_tokens == 16
    after = manager.stats()
    assert after.num_prompt_tokens == before.num_prompt_tokens
    assert after.num_hit_tokens == before.num_hit_tokens


def test_a_second_suspension_before_any_commit_keeps_what_the_first_one_saved(manager, opened):
    opened(manager, "a", 24)
    _, _, transfer = suspend(manager, "a", mode=SWAP)
    manager.complete_transfer(transfer, 0.001)
    manager.resume_sequences(["a"], runs_copies=True)
    suspend(manager, "a", mode=SWAP)
    [back], _, _ = manager.resume_sequences(["a"], runs_copies=True)
    assert back.num_computed_tokens == 23  # 16 of whole blocks, and what the third begins with
    assert len(back.copies) == 3


def test_a_resumption_finds_what_others_have_computed_meanwhile(manager, opened, plan):
    manager.open_sequences([plan("a", 40)])
    suspend(manager, "a")
    opened(manager, "b", 40)
    [back], _, _ = manager.resume_sequences(["a"])
    assert back.num_computed_tokens == 32


def test_measurements_that_are_far_out_hardly_count(manager):
    manager.observe_prefill(1000, 1.0)
    manager.observe_prefill(2**31 - 1, 1e-9)
    assert 1000 < manager.stats().prefill_tokens_per_s <= 1600
    manager.observe_prefill(1, 1e9)
    assert manager.stats().prefill_tokens_per_s > 800
