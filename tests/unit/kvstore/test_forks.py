"""Forks, truncation, and who copies a shared block."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest, OutOfBlocks
from kvstore.types import CommitPlan, ExtendPlan, ForkPlan, TruncatePlan


def test_the_first_writer_copies_and_the_last_one_does_not(managers, plan):
    manager = managers(8)
    (a,) = manager.open_sequences([plan("a", 12)])
    manager.fork_sequences([ForkPlan("a", "b"), ForkPlan("b", "c")])
    extended = manager.extend_sequences([ExtendPlan(one, 13) for one in "abc"])
    assert [(e.sequence_id, e.first_index, e.copied_from) for e in extended] == [
        ("a", 1, a.block_ids[1]),
        ("b", 1, a.block_ids[1]),
    ]
    assert manager.stats().num_held == 4
    tables = {info.sequence_id: info.block_ids for info in manager.list_sequences()[0]}
    assert tables["c"] == a.block_ids
    assert {table[0] for table in tables.values()} == {a.block_ids[0]}


def test_a_sole_owner_never_copies(managers, plan):
    manager = managers(8)
    manager.open_sequences([plan("a", 12)])
    manager.fork_sequences([ForkPlan("a", "b")])
    manager.close_sequences(["a"])
    assert manager.extend_sequences([ExtendPlan("b", 14)]) == []


def test_a_full_block_is_shared_for_good(managers, plan):
    manager = managers(8)
    (a,) = manager.open_sequences([plan("a", 16)])
    manager.fork_sequences([ForkPlan("a", "b")])
    extended = manager.extend_sequences([ExtendPlan("a", 17), ExtendPlan("b", 17)])
    assert [e.copied_from for e in extended] == [None, None]
    assert manager.stats().num_held == 4
    assert len(a.block_ids) == 2


def test_no_room_for_a_copy_changes_nothing(managers, plan):
    manager = managers(2)
    manager.open_sequences([plan("a", 12)])
    manager.fork_sequences([ForkPlan("a", "b")])
    before = manager.stats(), manager.list_sequences()
    with pytest.raises(OutOfBlocks):
        manager.extend_sequences([ExtendPlan("b", 13)])
    assert (manager.stats(), manager.list_sequences()) == before
    manager.close_sequences(["a"])
    assert manager.extend_sequences([ExtendPlan("b", 13)]) == []


def test_what_a_source_computes_later_is_not_held_by_its_fork(managers, plan):
    """Blocks after the fork are in a node of their own, and can be evicted before the fork's."""
    manager = managers(6)
    manager.open_sequences([plan("a", 9)])
    manager.commit_blocks([CommitPlan("a", 8)])
    manager.fork_sequences([ForkPlan("a", "b")])
    manager.extend_sequences([ExtendPlan("a", 24)])
    manager.commit_blocks([CommitPlan("a", 24, 9, list(range(9, 24)))])
    manager.close_sequences(["a"])
    assert manager.audit() == []
    assert (manager.stats().num_cached, manager.stats().num_held) == (2, 2)
    manager.open_sequences([plan("big", 32, 500)])
    assert manager.stats().num_evictions == 2


def test_a_block_that_is_cut_within_is_copied_if_others_can_find_it(managers, plan):
    manager = managers(8)
    (a,) = manager.open_sequences([plan("a", 17)])
    manager.commit_blocks([CommitPlan("a", 17)])
    manager.truncate_sequences([TruncatePlan("a", 12)])
    (extended,) = manager.extend_sequences([ExtendPlan("a", 13)])
    assert (extended.first_index, extended.copied_from) == (1, a.block_ids[1])
    manager.commit_blocks([CommitPlan("a", 13, 12, [999])])
    (again,) = manager.open_sequences([plan("b", 17)])
    assert again.num_cached_tokens == 16
    assert again.block_ids[:2] == a.block_ids[:2]


def test_what_was_cut_off_is_not_gone_on_with_though_the_same_tokens_come_back(managers, plan):
    """The block with the first tokens is in the tree, but not in the sequence any more."""
    manager = managers(8)
    manager.open_sequences([plan("a", 9)])
    manager.commit_blocks([CommitPlan("a", 9)])
    manager.truncate_sequences([TruncatePlan("a", 6)])
    manager.extend_sequences([ExtendPlan("a", 25)])
    manager.commit_blocks([CommitPlan("a", 8, 6, [6, 7])])
    manager.commit_blocks([CommitPlan("a", 24, 8, list(range(8, 25)))])
    assert manager.audit() == []
    manager.close_sequences(["a"])
    (again,) = manager.open_sequences([plan("b", 25)])
    assert again.num_cached_tokens == 24


def test_a_block_of_its_own_that_is_cut_within_leaves_the_prefix_it_was_computed_for(
    managers, plan
):
    """Another sequence has put the same prefix into the tree; the own block is written again."""
    manager = managers(8)
    manager.open_sequences([plan("a", 9), plan("b", 9)])
    manager.commit_blocks([CommitPlan("a", 9), CommitPlan("b", 9)])
    manager.truncate_sequences([TruncatePlan("b", 2)])
    manager.extend_sequences([ExtendPlan("b", 17)])
    manager.commit_blocks([CommitPlan("b", 17, 2, [*[99] * 6, *range(8, 17)])])
    assert manager.audit() == []
    (c,) = manager.open_sequences([plan("c", 17)])  # begins like a and goes on like b
    assert c.num_cached_tokens == 8


def test_truncating_again_changes_nothing(managers, plan):
    manager = managers(8)
    manager.open_sequences([plan("a", 20)])
    manager.truncate_sequences([TruncatePlan("a", 9)])
    before = manager.stats(), manager.list_sequences()
    manager.truncate_sequences([TruncatePlan("a", 9)])
    assert (manager.stats(), manager.list_sequences()) == before
    assert manager.stats().num_free == 6


def test_truncations_of_one_call_are_checked_one_after_the_other(managers, plan):
    manager = managers(8)
    manager.open_sequences([plan("a", 40)])
    before = manager.stats(), manager.list_sequences()
    for lengths in ((1, 40), (30, 35), (40, 41)):
        with pytest.raises(InvalidRequest, match="length"):
            manager.truncate_sequences([TruncatePlan("a", length) for length in lengths])
        assert (manager.stats(), manager.list_sequences()) == before
    manager.truncate_sequences([TruncatePlan("a", 30), TruncatePlan("a", 30), TruncatePlan("a", 9)])
    [info] = manager.list_sequences()[0]
    assert (info.length, len(info.block_ids)) == (9, 2)
