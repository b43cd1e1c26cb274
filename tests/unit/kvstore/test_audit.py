"""The audit finds what it is there to find: one corruption after the other."""

from __future__ import annotations

import pytest

from kvstore.eviction import DEFAULT_POLICY, POLICIES
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


def a_cached_node(tables):
    """The one that would be evicted first."""
    return tables._blocks.queue.nodes()[0]


def lose_a_free_block(tables):
    tables._blocks.frames.num_free -= 1


def free_a_block_twice(tables):
    frames = tables._blocks.frames
    frames._free[frames.num_free] = frames._free[0]
    frames.num_free += 1


def miscount_the_cached(tables):
    tables._blocks.frames.num_cached += 1


def empty_the_queue(tables):
    blocks = tables._blocks
    blocks.queue = POLICIES[DEFAULT_POLICY](12, blocks._is_held)


def leak_a_reference(tables):
    tables._blocks.frames.ref_counts[tables._sequences["a"].block_ids[0]] += 1


def free_what_is_findable(tables):
    frames = tables._blocks.frames
    frames.findable[frames._free[0]] = True


def cut_off_a_subtree(tables):
    a_cached_node(tables).parent.children.clear()


def swap_a_parent(tables):
    a_cached_node(tables).parent = tables._sequences["a"].chain.node


def kill_a_node(tables):
    a_cached_node(tables).is_alive = False


def hold_a_node_in_part(tables):
    tables._blocks.frames.ref_counts[a_cached_node(tables).blocks[-1]] += 1


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
        (empty_the_queue, "nodes to evict"),
        (kill_a_node, "dead"),
        (hold_a_node_in_part, "held in part"),
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
