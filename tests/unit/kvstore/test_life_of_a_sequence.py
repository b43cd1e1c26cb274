"""Open, extend, commit, close: what changes, and what a refusal leaves as it was."""

from __future__ import annotations

import pytest

from kvstore.errors import (
    InvalidCommit,
    InvalidRequest,
    OutOfBlocks,
    PromptExceedsPool,
    SequenceExists,
    SequenceNotFound,
)
from kvstore.types import CommitPlan, ExtendPlan, Namespace, OpenPlan, Update


def snapshot(manager):
    """All that a refused call must leave as it was."""
    return manager.stats(), manager.list_sequences(1000)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_open_takes_just_enough_blocks_and_wastes_less_than_one(managers, plan, block_size, extra):
    manager = managers(8, block_size)
    length = 2 * block_size + extra
    (opened,) = manager.open_sequences([plan("a", length)])
    num_blocks = -(-length // block_size)
    assert len(set(opened.block_ids)) == num_blocks
    assert opened.num_cached_tokens == 0
    stats = manager.stats()
    assert stats.num_held == num_blocks
    assert stats.num_waste_slots == num_blocks * block_size - length < block_size
    assert stats.waste_ratio == stats.num_waste_slots / (num_blocks * block_size)


def test_open_is_all_or_nothing_over_the_call(managers, plan):
    manager = managers(5)
    manager.open_sequences([plan("a", 16)])
    before = snapshot(manager)
    with pytest.raises(OutOfBlocks) as caught:
        manager.open_sequences([plan("b", 8, 100), plan("c", 24, 200)])
    assert caught.value.metadata == {"needed_block_count": "4", "free_block_count": "3"}
    assert snapshot(manager) == before


def test_a_refused_open_leaves_the_cache_findable(managers, plan):
    manager = managers(4)
    manager.open_sequences([plan("a", 17)])
    manager.commit_blocks([CommitPlan("a", 17)])
    manager.close_sequences(["a"])
    before = snapshot(manager)
    with pytest.raises(OutOfBlocks):
        manager.open_sequences([plan("b", 17), plan("c", 24, 100)])
    assert snapshot(manager) == before
    (opened,) = manager.open_sequences([plan("b", 17)])
    assert opened.num_cached_tokens == 16


def test_one_plans_allocation_does_not_evict_anothers_hits(managers, plan):
    manager = managers(5)
    for number in (0, 1):  # the prefix of 0 is the older one, first in line for eviction
        manager.open_sequences([plan("a", 17, 100 * number)])
        manager.commit_blocks([CommitPlan("a", 17)])
        manager.close_sequences(["a"])
    new, hit = manager.open_sequences([plan("new", 16, 500), plan("hit", 17)])
    assert (new.num_cached_tokens, hit.num_cached_tokens) == (0, 16)
    assert not set(new.block_ids) & set(hit.block_ids)


def test_a_prompt_that_never_fits_is_told_from_one_that_does_not_fit_now(managers, plan):
    manager = managers(3)
    manager.open_sequences([plan("a", 8)])
    before = snapshot(manager)
    with pytest.raises(PromptExceedsPool):
        manager.open_sequences([plan("b", 25, 100)])
    with pytest.raises(OutOfBlocks):
        manager.open_sequences([plan("b", 24, 100)])
    assert snapshot(manager) == before


def test_a_repeated_open_returns_the_same_table_and_changes_nothing(managers, plan):
    manager = managers(8)
    first = manager.open_sequences([plan("a", 12)])
    manager.extend_sequences([ExtendPlan("a", 30)])
    manager.commit_blocks([CommitPlan("a", 13, 12, [77])])
    before = snapshot(manager)
    assert manager.open_sequences([plan("a", 12)]) == first
    assert snapshot(manager) == before


def test_a_plan_listed_twice_in_one_call_opens_one_sequence(managers, plan):
    manager = managers(8)
    first, second = manager.open_sequences([plan("a", 12), plan("a", 12)])
    assert first == second
    assert manager.stats().num_sequences == 1
    with pytest.raises(SequenceExists):
        manager.open_sequences([plan("b", 12), plan("b", 13)])
    assert manager.stats().num_sequences == 1


@pytest.mark.parametrize("length", [11, 13])
def test_an_open_id_with_other_tokens_is_refused(managers, plan, length):
    manager = managers(8)
    manager.open_sequences([plan("a", 12)])
    manager.extend_sequences([ExtendPlan("a", 13)])
    manager.commit_blocks([CommitPlan("a", 12, 12, [12])])
    before = snapshot(manager)
    with pytest.raises(SequenceExists):
        manager.open_sequences([plan("a", length)])
    with pytest.raises(SequenceExists):
        manager.open_sequences([plan("a", 12, namespace=Namespace(b"other"))])
    assert snapshot(manager) == before


@pytest.mark.parametrize(
    ("sequence_id", "token_ids", "field"),
    [
        ("", [1], "sequence_id"),
        ("x" * 129, [1], "sequence_id"),
        ("é" * 65, [1], "sequence_id"),
        ("a", [], "token_ids"),
        ("a", [1, -1], "token_ids"),
        ("a", [2**31], "token_ids"),
        ("a", [1.5], "token_ids"),
    ],
)
def test_a_malformed_plan_is_refused_by_field(managers, sequence_id, token_ids, field):
    manager = managers(8)
    before = snapshot(manager)
    with pytest.raises(InvalidRequest) as caught:
        manager.open_sequences([OpenPlan(sequence_id, token_ids, Namespace(b"m"))])
    assert caught.value.metadata["field"] == field
    assert snapshot(manager) == before


def test_extend_crosses_block_boundaries_and_keeps_the_table(managers, plan):
    manager = managers(8)
    (opened,) = manager.open_sequences([plan("a", 7)])
    assert manager.extend_sequences([ExtendPlan("a", 8)]) == []
    (across,) = manager.extend_sequences([ExtendPlan("a", 25)])
    assert (across.first_index, len(across.block_ids)) == (1, 3)
    (info,), _ = manager.list_sequences()
    assert info.block_ids == opened.block_ids + across.block_ids
    assert info.length == 25
    assert manager.stats().num_waste_slots == 7


@pytest.mark.parametrize("length", [-5, 0, 11, 12])
def test_extend_to_a_length_that_is_there_changes_nothing(managers, plan, length):
    manager = managers(8)
    manager.open_sequences([plan("a", 12)])
    before = snapshot(manager)
    assert manager.extend_sequences([ExtendPlan("a", length)]) == []
    assert snapshot(manager) == before


def test_extend_is_all_or_nothing_over_the_call(managers, plan):
    manager = managers(4)
    manager.open_sequences([plan("a", 8), plan("b", 8, 100)])
    before = snapshot(manager)
    with pytest.raises(OutOfBlocks):
        manager.extend_sequences([ExtendPlan("a", 16), ExtendPlan("b", 24)])
    with pytest.raises(SequenceNotFound):
        manager.extend_sequences([ExtendPlan("a", 16), ExtendPlan("ghost", 8)])
    assert snapshot(manager) == before


def test_extending_one_sequence_twice_in_a_call_counts_its_blocks_once(managers, plan):
    manager = managers(4)
    manager.open_sequences([plan("a", 8)])
    first, second = manager.extend_sequences([ExtendPlan("a", 24), ExtendPlan("a", 32)])
    assert (first.first_index, len(first.block_ids)) == (1, 2)
    assert (second.first_index, len(second.block_ids)) == (3, 1)


@pytest.mark.parametrize(
    "commit",
    [
        pytest.param(CommitPlan("a", 4, 13, [1]), id="gap"),
        pytest.param(CommitPlan("a", 4, -1, [1]), id="negative start"),
        pytest.param(CommitPlan("a", 4, 0, [9]), id="other tokens"),
        pytest.param(CommitPlan("a", 4, 11, [9, 9]), id="other tokens before new ones"),
        pytest.param(CommitPlan("a", 4, 12, [-1]), id="no token"),
        pytest.param(CommitPlan("a", 13), id="beyond the known tokens"),
        pytest.param(CommitPlan("a", 15, 12, [1, 2, 3]), id="beyond the length"),
        pytest.param(CommitPlan("a", -1), id="negative count"),
    ],
)
def test_an_invalid_commit_changes_nothing(managers, plan, commit):
    manager = managers(8)
    manager.open_sequences([plan("a", 12), plan("b", 12, 100)])
    manager.extend_sequences([ExtendPlan("a", 14)])
    before = snapshot(manager)
    with pytest.raises(InvalidCommit):
        manager.commit_blocks([CommitPlan("b", 12), commit])
    assert snapshot(manager) == before
    manager.close_sequences(["b"])
    assert manager.stats().num_cached == 0
    manager.commit_blocks([CommitPlan("a", 14, 12, [1, 2])])  # what was refused is not known


def test_a_commit_for_an_unknown_sequence_or_two_for_one_are_refused(managers, plan):
    manager = managers(8)
    manager.open_sequences([plan("a", 12)])
    before = snapshot(manager)
    with pytest.raises(SequenceNotFound):
        manager.commit_blocks([CommitPlan("a", 8), CommitPlan("ghost", 8)])
    with pytest.raises(InvalidCommit):
        manager.commit_blocks([CommitPlan("a", 8), CommitPlan("a", 9)])
    assert snapshot(manager) == before


def test_a_repeated_or_lesser_commit_changes_nothing(managers, plan):
    manager = managers(8)
    manager.open_sequences([plan("a", 12)])
    manager.extend_sequences([ExtendPlan("a", 14)])
    commit = CommitPlan("a", 13, 12, [50, 51])
    manager.commit_blocks([commit])
    before = snapshot(manager)
    manager.commit_blocks([commit])
    manager.commit_blocks([CommitPlan("a", 5)])
    manager.commit_blocks([CommitPlan("a", 0, 10, [10, 11, 50])])
    assert snapshot(manager) == before


def test_close_releases_everything_and_ignores_unknown_ids(managers, plan):
    manager = managers(8)
    manager.open_sequences([plan("a", 20), plan("b", 20, 100)])
    manager.close_sequences(["ghost", "a", "a"])
    stats = manager.stats()
    assert (stats.num_free, stats.num_held, stats.num_sequences) == (5, 3, 1)
    manager.close_sequences(["a", "b"])
    assert manager.stats().num_free == 8
    assert manager.stats().num_waste_slots == 0


def test_an_update_applies_commits_closes_extends_opens_in_this_order(managers, plan):
    manager = managers(4)
    manager.open_sequences([plan("a", 17), plan("b", 8, 100)])
    result = manager.update(
        Update(
            commits=[CommitPlan("a", 17)],
            closes=["a"],
            extends=[ExtendPlan("b", 9)],
            opens=[plan("c", 17)],
        )
    )
    # a's third block is reused by b's extension, and its cached two by c, which finds no
    # room for its own third.
    assert [e.sequence_id for e in result.extended] == ["b"]
    assert result.opened == []
    assert [(r.sequence_id, r.reason) for r in result.refused] == [("c", "OUT_OF_BLOCKS")]
    manager.update(Update(closes=["b"]))
    (opened,) = manager.update(Update(opens=[plan("c", 17)])).opened
    assert opened.num_cached_tokens == 16
