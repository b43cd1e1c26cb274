"""The audit finds what it is there to find, one corruption after the other, and repairs it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.eviction import DEFAULT_POLICY, POLICIES
from kvstore.types import CommitPlan, Namespace, PinPlan

OTHER = Namespace(b"m" * 32, tenant="t")


@pytest.fixture
def manager(managers, plan):
    """A pool with held, shared, pinned, cached and free blocks."""
    manager = managers(14)
    manager.open_sequences([plan("gone", 24), plan("a", 17, 100)])
    manager.commit_blocks([CommitPlan("gone", 24), CommitPlan("a", 17)])
    manager.close_sequences(["gone"])
    manager.open_sequences([plan("b", 20, 100)])
    manager.open_sequences([plan("c", 17, 300, OTHER)])
    manager.commit_blocks([CommitPlan("c", 17)])
    manager.pin_prefix(PinPlan("pin", "o", 60, sequence_id="c"))
    assert manager.audit() == []
    return manager


def a_cached_node(state):
    """The one that would be evicted first."""
    return state.blocks.tenants.get("").partition.queue.nodes()[0]


def lose_a_free_block(state):
    state.blocks.frames.device.num_free -= 1


def free_a_block_twice(state):
    region = state.blocks.frames.device
    region._free[region.num_free] = region._free[0]
    region.num_free += 1


def miscount_the_cached(state):
    state.blocks.frames.device.num_cached += 1


def empty_the_queue(state):
    blocks = state.blocks
    empty = POLICIES[DEFAULT_POLICY](12, blocks.is_held)
    blocks.tenants.get("").partition.queue = empty


def leak_a_reference(state):
    state.blocks.frames.ref_counts[state.sequences["a"].block_ids[0]] += 1


def free_what_is_findable(state):
    frames = state.blocks.frames
    frames.findable[frames.device._free[0]] = True


def cut_off_a_subtree(state):
    a_cached_node(state).parent.children.clear()


def swap_a_parent(state):
    a_cached_node(state).parent = state.sequences["a"].chain.node


def kill_a_node(state):
    a_cached_node(state).is_alive = False


def hold_a_node_in_part(state):
    state.blocks.frames.ref_counts[a_cached_node(state).blocks[-1]] += 1


def miscount_the_waste(state):
    state.num_waste_slots += 1


def compute_beyond_the_length(state):
    state.sequences["a"].num_computed = 18


def record_other_tokens(state):
    state.blocks.frames.records.tokens[a_cached_node(state).blocks[0], 0] += 1


def record_another_parent(state):
    state.blocks.frames.records.parents[a_cached_node(state).blocks[1]] = 9


def record_another_namespace(state):
    state.blocks.frames.records.namespaces[a_cached_node(state).blocks[0]] = 99


def outdate_a_parent(state):
    state.blocks.frames.records.generations[a_cached_node(state).blocks[0]] += 1


def miscount_a_tenant(state):
    state.blocks.tenants.get("t").count(held=1)


def miscount_pins(state):
    state.blocks.pin_counts[state.sequences["a"].block_ids[0]] += 1


def orphan_a_sequence(state):
    state.sequences["a"].epoch = 7


DERIVED = [
    (lose_a_free_block, "counted"),
    (free_a_block_twice, "free list"),
    (miscount_the_cached, "counted"),
    (empty_the_queue, "nodes to evict"),
    (kill_a_node, "dead"),
    (hold_a_node_in_part, "held in part"),
    (leak_a_reference, "references"),
    (free_what_is_findable, "reaches other blocks"),
    (cut_off_a_subtree, "reaches other blocks"),
    (swap_a_parent, "another parent"),
    (miscount_the_waste, "waste"),
    (record_another_parent, "other parents"),
    (record_another_namespace, "another namespace"),
    (outdate_a_parent, "somebody else"),
    (miscount_a_tenant, "counted"),
    (miscount_pins, "other pins"),
]


@pytest.mark.parametrize(("corrupt", "words"), DERIVED)
def test_a_corruption_is_found_and_repaired(manager, plan, corrupt, words):
    tables = manager.list_sequences()
    corrupt(manager._attached.state)
    assert any(words in finding.text for finding in manager.audit())
    assert manager.audit(repair=True) != []
    assert manager.audit() == []
    assert manager.list_sequences() == tables
    assert [pin.num_cached_tokens for pin in manager.list_pins()] == [16]
    manager.close_sequences(["a", "b", "c"])
    [again] = manager.open_sequences([plan("again", 20, 100)])
    assert again.num_cached_tokens == 16


def test_tokens_that_differ_from_the_records_are_not_trusted_after_a_repair(manager, plan):
    """Which of the two is right cannot be known; the records are what a restart would read."""
    record_other_tokens(manager._attached.state)
    assert any("other tokens" in finding.text for finding in manager.audit())
    manager.audit(repair=True)
    assert manager.audit() == []


def compute_too_little(state):
    state.sequences["a"].num_computed = 0


def shorten_a_table(state):
    state.sequences["a"].length += 8


def change_a_token(state):
    state.sequences["a"].tokens[3] += 1


@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (compute_beyond_the_length, "more tokens are computed"),
        (compute_too_little, "before it was computed"),
        (shorten_a_table, "blocks for"),
        (change_a_token, "another prefix"),
        (orphan_a_sequence, "lease is over"),
    ],
)
def test_a_corrupt_sequence_is_found(manager, corrupt, words):
    corrupt(manager._attached.state)
    assert any(words in finding.text for finding in manager.audit())
    manager.close()  # what the test broke


def test_a_repair_that_finds_nothing_changes_nothing(manager):
    before, state = manager.stats(), manager._attached.state
    assert manager.audit(repair=True) == []
    assert manager._attached.state is state
    assert manager.stats() == replace(before, num_audits=before.num_audits + 1)


@pytest.mark.parametrize("corrupt", [compute_beyond_the_length, shorten_a_table])
def test_a_sequence_that_contradicts_itself_is_given_up_and_the_others_stay(manager, corrupt):
    """By a repair, and by the next process alike."""
    corrupt(manager._attached.state)
    manager.audit(repair=True)
    assert manager.audit() == []
    assert [info.sequence_id for info in manager.list_sequences()[0]] == ["b", "c"]
    assert [pin.num_cached_tokens for pin in manager.list_pins()] == [16]
