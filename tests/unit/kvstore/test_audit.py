"""The audit finds what it is there to find: one corruption after the other."""

from __future__ import annotations

import pytest

from kvstore.types import CommitPlan


@pytest.fixture
def tables(managers, plan):
    """A pool with held, shared, cached and free blocks; repaired after the test."""
    manager = managers(12)
    manager.open_sequences([plan("gone", 24), plan("a", 17, 100)])
    manager.commit_blocks([CommitPlan("gone", 24), CommitPlan("a", 17)])
    manager.close_sequences(["gone"])
    manager.open_sequences([plan("b", 20, 100)])
    assert manager.audit() == []
    yield manager._attached.tables
    manager.close()  # what the test broke


def lose_a_free_block(tables):
    tables._blocks.frames._free.pop()


def free_a_block_twice(tables):
    frames = tables._blocks.frames
    frames._free.append(frames._free[0])


def miscount_the_cached(tables):
    tables._blocks.frames.num_cached += 1


def break_the_ring(tables):
    frames = tables._blocks.frames
    frames._newer[frames.oldest_cached] = frames.oldest_cached


def leak_a_reference(tables):
    tables._blocks.frames.ref_counts[tables._sequences["a"].block_ids[0]] += 1


def free_what_is_findable(tables):
    frames = tables._blocks.frames
    frames._findable[frames._free[0]] = 1


def cut_off_a_subtree(tables):
    frames, index = tables._blocks.frames, tables._blocks.index
    index._children[index.parent(index.parent(frames.oldest_cached))] = None


def swap_a_parent(tables):
    frames, index = tables._blocks.frames, tables._blocks.index
    index._parent[frames.oldest_cached] = tables._sequences["a"].block_ids[0]


def miscount_the_waste(tables):
    tables._num_waste_slots += 1


def compute_beyond_the_length(tables):
    tables._sequences["a"].num_computed = 18


def forget_what_was_computed(tables):
    tables._sequences["a"].num_computed = 0


def table_too_short(tables):
    tables._sequences["a"].length += 8


def other_tokens(tables):
    tables._sequences["a"].tokens[3] += 1


@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (lose_a_free_block, "no state"),
        (free_a_block_twice, "in two"),
        (miscount_the_cached, "counted"),
        (break_the_ring, "counted"),
        (leak_a_reference, "references"),
        (free_what_is_findable, "free block is findable"),
        (cut_off_a_subtree, "reaches other blocks"),
        (swap_a_parent, "another parent"),
        (miscount_the_waste, "waste"),
        (compute_beyond_the_length, "more tokens are computed"),
        (forget_what_was_computed, "before it was computed"),
        (table_too_short, "blocks for"),
        (other_tokens, "another prefix"),
    ],
)
def test_a_corruption_is_found(tables, corrupt, words):
    corrupt(tables)
    assert any(words in finding for finding in tables.audit())
