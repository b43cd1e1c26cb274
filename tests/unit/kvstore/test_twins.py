"""Sequences that computed the same tokens at once: the tree has the blocks of one of them."""

from __future__ import annotations

import pytest

from kvstore.types import (
    CommitPlan,
    ExtendPlan,
    ForkPlan,
    PinPlan,
    SuspendMode,
    SuspendPlan,
    TruncatePlan,
)

TOKENS = list(range(24))
MORE = list(range(500, 532))


@pytest.fixture
def manager(managers):
    return managers(24, num_host_blocks=12)


@pytest.fixture
def twins(manager, plan):
    """`a` has put three blocks into the tree, `b` the fourth behind them, which `a` also has."""
    manager.open_sequences([plan("a", 24), plan("b", 24)])
    manager.commit_blocks([CommitPlan("a", 24), CommitPlan("b", 24)])
    for name in "ba":
        write(manager, name, 24, MORE[:8])


def write(manager, name, start, tokens):
    """Slots for tokens, and their KV."""
    end = start + len(tokens)
    manager.extend_sequences([ExtendPlan(name, end)])
    manager.commit_blocks([CommitPlan(name, end, start, tokens)])


def lose_the_fourth(manager, plan):
    """It goes with `b`, and then for want of room."""
    manager.close_sequences(["b"])
    num_blocks = manager.stats().num_blocks
    free = num_blocks - manager.stats().num_held
    manager.open_sequences([plan("big", free * 8, 9000)])
    manager.close_sequences(["big"])


def test_what_was_cut_off_and_computed_again_is_not_continued_in_place(manager, twins, plan):
    lose_the_fourth(manager, plan)
    manager.truncate_sequences([TruncatePlan("a", 8)])
    write(manager, "a", 8, [*TOKENS[8:], *MORE[:16]])
    assert manager.audit() == []


def test_a_fork_before_the_end_keeps_what_it_shares_apart(manager, twins, plan):
    manager.fork_sequences([ForkPlan("a", "f", 24)])
    lose_the_fourth(manager, plan)
    write(manager, "a", 32, MORE[8:16])
    manager.close_sequences(["a"])
    assert manager.audit() == []


def test_a_cut_back_to_what_a_fork_shares_keeps_it_apart(manager, twins, plan):
    manager.fork_sequences([ForkPlan("a", "f", 24)])
    manager.truncate_sequences([TruncatePlan("a", 24)])
    lose_the_fourth(manager, plan)
    write(manager, "a", 24, MORE[8:16])
    manager.close_sequences(["a"])
    assert manager.audit() == []


def test_a_branch_that_is_given_up_leaves_what_a_fork_shares_apart(manager, plan):
    manager.open_sequences([plan("a", 24), plan("b", 24)])
    manager.commit_blocks([CommitPlan("a", 24), CommitPlan("b", 24)])
    write(manager, "b", 24, MORE[:8])
    write(manager, "a", 24, MORE[8:16])
    manager.fork_sequences([ForkPlan("a", "f", 24)])
    manager.truncate_sequences([TruncatePlan("a", 24)])
    lose_the_fourth(manager, plan)
    write(manager, "a", 24, MORE[16:24])
    manager.close_sequences(["a"])
    assert manager.audit() == []


def test_a_run_of_several_holders_is_not_one_after_a_crash(managers, storage, plan):
    """All its blocks have one reference each."""
    before = managers(8, storage=storage)
    before.open_sequences([plan("a", 8), plan("b", 8)])
    before.commit_blocks([CommitPlan("a", 8), CommitPlan("b", 8)])
    for name in "ba":
        write(before, name, 8, MORE[:8])
    after = managers(8, storage=storage)
    after.close_sequences(["b"])
    assert after.audit() == []
    [a] = after.list_sequences()[0]
    assert a.num_computed_tokens == 16


def test_a_sequence_is_pinned_with_its_own_blocks_when_the_others_have_left(manager, twins):
    """The fourth block is in the host pool with `b`; `a` has one of its own."""
    [answer], _, transfer = manager.suspend_sequences(
        [SuspendPlan("b", SuspendMode.SWAP)], runs_copies=True
    )
    assert answer.num_copied_blocks == 1
    manager.complete_transfer(transfer, 0.001)
    info = manager.pin_prefix(PinPlan("pin", "owner", 60.0, sequence_id="a"))
    assert info.num_cached_tokens == info.num_tokens == 32
    assert manager.stats().num_host_cached == 0
