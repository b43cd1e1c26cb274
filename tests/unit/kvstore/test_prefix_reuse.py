"""What a prompt finds in the cache, and what it must never find."""

from __future__ import annotations

import pytest

from kvstore.types import CommitPlan, ExtendPlan, Namespace, OpenPlan


def run(manager, plan, num_computed=None):
    """Open, compute and close."""
    (opened,) = manager.open_sequences([plan])
    count = len(plan.token_ids) if num_computed is None else num_computed
    manager.commit_blocks([CommitPlan(plan.sequence_id, count)])
    manager.close_sequences([plan.sequence_id])
    return opened


def cached(manager, plan) -> int:
    """Tokens that a plan finds; the pool's memory of it is as before."""
    (opened,) = manager.open_sequences([plan])
    manager.close_sequences([plan.sequence_id])
    return opened.num_cached_tokens


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_hits_are_full_blocks_and_leave_a_token_to_compute(managers, plan, block_size):
    manager = managers(16, block_size)
    first = run(manager, plan("a", 3 * block_size))
    for length, blocks in [
        (1, 0),
        (block_size, 0),
        (block_size + 1, 1),
        (2 * block_size, 1),
        (2 * block_size + 1, 2),
        (3 * block_size, 2),
        (5 * block_size, 3),
    ]:
        (opened,) = manager.open_sequences([plan("b", length)])
        assert opened.num_cached_tokens == blocks * block_size
        assert opened.block_ids[:blocks] == first.block_ids[:blocks]
        manager.close_sequences(["b"])


def test_a_cancelled_prefill_publishes_nothing(managers, plan):
    """Fault C5."""
    manager = managers(8)
    manager.open_sequences([plan("a", 24)])
    manager.close_sequences(["a"])
    assert cached(manager, plan("b", 24)) == 0
    assert manager.stats().num_cached == 0


def test_only_what_was_computed_is_published(managers, plan):
    manager = managers(8)
    run(manager, plan("a", 40), num_computed=23)
    assert cached(manager, plan("b", 40)) == 16


def test_blocks_are_findable_while_their_sequence_is_open(managers, plan):
    manager = managers(8)
    (a,) = manager.open_sequences([plan("a", 17)])
    manager.commit_blocks([CommitPlan("a", 17)])
    (b,) = manager.open_sequences([plan("b", 17)])
    assert b.num_cached_tokens == 16
    assert b.block_ids[:2] == a.block_ids[:2]
    manager.close_sequences(["a"])
    assert manager.stats().num_held == 3


def test_generated_tokens_are_found_too(managers, plan):
    manager = managers(8)
    manager.open_sequences([plan("a", 6)])
    manager.extend_sequences([ExtendPlan("a", 9)])
    manager.commit_blocks([CommitPlan("a", 8, 6, [6, 7, 8])])
    manager.close_sequences(["a"])
    assert cached(manager, plan("b", 12)) == 8


def test_equal_blocks_below_different_prefixes_are_different(managers):
    manager = managers(16)
    ns = Namespace(b"m")
    tail = [5] * 8
    run(manager, OpenPlan("a", [1] * 8 + tail + [0], ns))
    assert cached(manager, OpenPlan("b", [2] * 8 + [*tail, 0], ns)) == 0
    assert cached(manager, OpenPlan("b", [*tail, 0], ns)) == 0


def test_an_adapter_named_like_a_salt_shares_nothing(managers):
    """Fault C1, and its relatives: every part is compared as itself."""
    manager = managers(32)
    tokens = list(range(33))
    spaces = [
        Namespace(b"m", adapter="X"),
        Namespace(b"m", salt="X"),
        Namespace(b"m", tenant="X"),
        Namespace(b"m"),
        Namespace(b"mX"),
        Namespace(b"X", "m"),
    ]
    for number, space in enumerate(spaces):
        assert run(manager, OpenPlan(str(number), tokens, space)).num_cached_tokens == 0
    for space in spaces:
        assert cached(manager, OpenPlan("again", tokens, space)) == 32


def test_the_least_recently_used_goes_first_and_its_tail_before_its_head(managers, plan):
    manager = managers(6)
    run(manager, plan("a", 24))
    run(manager, plan("b", 24, 100))
    assert cached(manager, plan("x", 17)) == 16  # evicts a's tail, uses a's head again
    assert manager.stats().num_evictions == 1
    manager.open_sequences([plan("c", 24, 200)])  # the free block, then b's last two
    assert manager.stats().num_evictions == 3
    (b,) = manager.open_sequences([plan("b", 9, 100)])
    assert b.num_cached_tokens == 8
    manager.close_sequences(["b", "c"])
    assert cached(manager, plan("a", 9)) == 8


def test_free_blocks_are_used_before_cached_ones(managers, plan):
    manager = managers(6)
    run(manager, plan("a", 17))
    manager.open_sequences([plan("b", 32, 100)])
    assert manager.stats().num_evictions == 0
    assert manager.stats().num_cached == 2
    manager.close_sequences(["b"])
    assert cached(manager, plan("a", 17)) == 16


def test_eviction_is_counted_and_forgotten(managers, plan):
    manager = managers(3)
    run(manager, plan("a", 24))
    manager.open_sequences([plan("b", 16, 100)])
    stats = manager.stats()
    assert (stats.num_evictions, stats.num_cached, stats.num_held) == (2, 1, 2)
    manager.close_sequences(["b"])
    assert cached(manager, plan("a", 24)) == 8


def test_twins_that_computed_the_same_prefix_keep_one_of_them(managers, plan):
    manager = managers(8)
    a, b = manager.open_sequences([plan("a", 17), plan("b", 17)])
    assert not set(a.block_ids) & set(b.block_ids)
    manager.commit_blocks([CommitPlan("a", 17), CommitPlan("b", 17)])
    manager.close_sequences(["a", "b"])
    stats = manager.stats()
    assert (stats.num_cached, stats.num_free) == (2, 6)
    (opened,) = manager.open_sequences([plan("c", 17)])
    assert opened.block_ids[:2] == a.block_ids[:2]


def test_a_twins_continuation_is_found_below_the_others_prefix(managers, plan):
    manager = managers(16)
    a, b = manager.open_sequences([plan("a", 9), plan("b", 33)])
    manager.commit_blocks([CommitPlan("a", 9), CommitPlan("b", 33)])
    manager.close_sequences(["b", "a"])
    (opened,) = manager.open_sequences([plan("c", 33)])
    assert opened.num_cached_tokens == 32
    assert opened.block_ids[:4] == [a.block_ids[0], *b.block_ids[1:4]]


def test_evicting_a_prefix_leaves_nothing_cached_out_of_reach(managers, plan):
    manager = managers(8)
    # a's block 0 is in the index, and b's block 1 below it, while b's own block 0 is a copy.
    manager.open_sequences([plan("a", 9), plan("b", 24)])
    manager.commit_blocks([CommitPlan("a", 9), CommitPlan("b", 17)])
    manager.close_sequences(["a"])
    manager.open_sequences([plan("big", 40, 100)])  # takes all: a's block is evicted
    manager.close_sequences(["big"])
    assert cached(manager, plan("c", 24)) == 0
    assert manager.audit() == []
    # b still has the whole prefix: its next commit makes all of it findable again.
    manager.commit_blocks([CommitPlan("b", 24)])
    assert cached(manager, plan("c", 25)) == 24


def test_a_reused_block_is_not_taken_for_the_prefix_it_once_held(managers, plan):
    manager = managers(8)
    (a,) = manager.open_sequences([plan("a", 9)])
    manager.open_sequences([plan("b", 17)])
    manager.commit_blocks([CommitPlan("a", 9), CommitPlan("b", 9)])  # b continues below a's
    manager.close_sequences(["a"])
    (other,) = manager.open_sequences([plan("other", 40, 100)])
    manager.commit_blocks([CommitPlan("other", 40)])
    assert a.block_ids[0] in other.block_ids
    manager.commit_blocks([CommitPlan("b", 17)])
    manager.close_sequences(["b", "other"])
    assert cached(manager, plan("d", 17)) == 16
    position = 8 * other.block_ids.index(a.block_ids[0])
    head = list(range(100, 108 + position))
    mixed = OpenPlan("c", [*head, *range(8, 16), 0], plan("c", 1).namespace)
    assert cached(manager, mixed) == len(head)


def test_an_orphaned_sequence_leaves_no_cached_blocks(managers, plan):
    manager = managers(8)
    manager.open_sequences([plan("a", 9), plan("b", 24)])
    manager.commit_blocks([CommitPlan("a", 9), CommitPlan("b", 24)])
    manager.close_sequences(["a"])
    manager.open_sequences([plan("big", 40, 100)])
    manager.close_sequences(["b", "big"])
    assert manager.stats().num_cached == 0
    assert manager.stats().num_free == 8


def test_releasing_a_twin_keeps_the_prefix_younger_than_what_is_below_it(managers, plan):
    manager = managers(8)
    manager.open_sequences([plan("a", 9), plan("b", 25)])
    manager.commit_blocks([CommitPlan("a", 9), CommitPlan("b", 25)])
    manager.close_sequences(["a"])
    manager.close_sequences(["b"])
    # Five blocks are free. The sixth evicts a tail, not the prefix that a left long ago.
    manager.open_sequences([plan("c", 48, 100)])
    manager.close_sequences(["c"])
    assert cached(manager, plan("d", 25)) == 16


def test_a_namespace_without_blocks_is_forgotten(managers):
    manager = managers(2)
    for number in range(50):
        space = Namespace(b"m", salt=str(number))
        run(manager, OpenPlan("a", list(range(9)), space))
    state = manager._attached.state
    assert state.blocks.tree.num_namespaces <= 2
