"""Faults that other systems had, as far as they concern two pools and their sizes.

docs/faults.md lists where the others are.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from kvstore import posix_pool
from kvstore.attachment import ManagerOptions
from kvstore.manager import PageManager
from kvstore.posix_pool import SHM_DIRECTORY, PosixStorage
from kvstore.types import (
    CommitPlan,
    ExtendPlan,
    ForkPlan,
    Namespace,
    OpenPlan,
    SuspendMode,
    SuspendPlan,
    Update,
)
from tests.unit.kvstore.conftest import SHAPE

OURS, THEIRS = Namespace(b"m", tenant="a"), Namespace(b"m", tenant="b")


def ask(manager, sequence_id, tokens, namespace):
    """Open a sequence as a driver that runs copies; what it got, the copies, their transfer."""
    plan = OpenPlan(sequence_id, tokens, namespace)
    result = manager.update(Update(opens=[plan], runs_copies=True))
    [opened] = result.opened
    return opened, result.copies, result.transfer


def compute(manager, sequence_id, tokens, namespace):
    opened, _, transfer = ask(manager, sequence_id, tokens, namespace)
    manager.commit_blocks([CommitPlan(sequence_id, len(tokens))])
    return opened, transfer


def swap(manager, sequence_id):
    plan = SuspendPlan(sequence_id, SuspendMode.SWAP)
    [answer], copies, transfer = manager.suspend_sequences([plan], runs_copies=True)
    return answer, copies, transfer


def hit(manager, tokens, namespace) -> int:
    """Tokens that a new sequence would find."""
    opened, _, _ = ask(manager, "asks", tokens, namespace)
    manager.close_sequences(["asks"])
    return opened.num_cached_tokens


def available(manager) -> int:
    """Blocks that nobody holds; every block is counted once."""
    stats = manager.stats()
    assert stats.num_free + stats.num_cached + stats.num_held == stats.num_blocks
    return stats.num_free + stats.num_cached


def complete_all(manager) -> None:
    """All copies that were ever asked for were run."""
    manager.complete_transfer(manager._attached.state.blocks.host._transfer - 1, 0.0)


def swap_out_and_in(manager, number, *, completes_first) -> list[str]:
    """Three samples of 20 tokens leave by swap and come back; their ids."""
    names = [f"{number}{letter}" for letter in "abc"]
    plan = OpenPlan(names[0], range(100 * number, 100 * number + 20), OURS, group="g")
    forks = [ForkPlan(names[0], name) for name in names[1:]]
    assert manager.update(Update(opens=[plan], runs_copies=True)).refused == []
    left = manager.update(
        Update(
            commits=[CommitPlan(names[0], 20)],
            forks=forks,
            suspends=[SuspendPlan(names[0], SuspendMode.SWAP)],
            runs_copies=True,
        )
    )
    assert [one.sequence_id for one in left.suspended] == names
    if completes_first:
        complete_all(manager)
    back = manager.update(Update(resumes=names[:1], runs_copies=True))
    assert [one.sequence_id for one in back.resumed] == names
    assert left.refused == back.refused == []
    return names


@pytest.mark.parametrize("way", ["suspended", "evicted"])
def test_c3_a_block_that_moves_to_the_host_pool_keeps_its_namespace(managers, way):
    """Asserted both ways: a salt that is lost gives others a hit, a wrong one gives us none."""
    manager = managers(10, num_host_blocks=12)
    tokens = range(65)
    _, transfer = compute(manager, "ours", tokens, OURS)
    if way == "suspended":
        _, _, transfer = swap(manager, "ours")
    else:
        manager.close_sequences(["ours"])
        _, _, transfer = ask(manager, "large", range(1000, 1080), THEIRS)
        manager.close_sequences(["large"])
    assert transfer
    manager.complete_transfer(transfer, 0.0)
    assert manager.stats().num_demotions >= 8
    assert hit(manager, tokens, THEIRS) == 0
    assert hit(manager, tokens, OURS) == 64
    assert hit(manager, tokens, THEIRS._replace(tenant="", salt="a")) == 0


def test_c6_a_block_that_is_still_being_copied_is_not_found(managers):
    manager = managers(10, num_host_blocks=12)
    tokens = range(65)
    compute(manager, "a", tokens, OURS)
    _, copies, transfer = swap(manager, "a")
    assert len(copies) == 9
    assert hit(manager, tokens, OURS) == 0
    manager.complete_transfer(transfer - 1, 0.0)
    assert hit(manager, tokens, OURS) == 0
    manager.complete_transfer(transfer, 0.0)
    assert hit(manager, tokens, OURS) == 64


def test_c6_a_driver_that_is_replaced_leaves_no_block_half_copied(managers):
    manager = managers(10, num_host_blocks=12)
    compute(manager, "a", range(65), OURS)
    _, _, transfer = swap(manager, "a")
    manager.acquire_driver_lease()
    manager.complete_transfer(transfer, 0.0)
    assert hit(manager, range(65), OURS) == 0


def test_c7_blocks_of_the_host_pool_go_to_the_positions_that_they_are_for(managers):
    """The page pool holds block 0 of 4, the host pool the others."""
    manager = managers(6, num_host_blocks=8)
    tokens = list(range(33))
    compute(manager, "a", tokens, OURS)
    _, _, transfer = swap(manager, "a")
    manager.complete_transfer(transfer, 0.0)
    # Somebody who runs no copies computes block 0 again, which so comes to the page pool.
    manager.open_sequences([OpenPlan("first", tokens[:8], OURS)])
    manager.commit_blocks([CommitPlan("first", 8)])
    opened, _, _ = ask(manager, "b", tokens, OURS)
    assert opened.num_cached_tokens == 32
    [[first], _] = [manager.list_sequences()[0][1].block_ids, None]
    assert opened.block_ids[0] == first
    assert [copy.target for copy in opened.copies] == opened.block_ids[1:4]
    records = manager._attached.state.blocks.frames.records
    for position, copy in enumerate(opened.copies, start=1):
        assert copy.source >= 6, "it is a block of the host pool"
        assert records.tokens[copy.source].tolist() == tokens[8 * position : 8 * position + 8]


@pytest.mark.parametrize("num_host_blocks", [0, 3])
def test_c11_without_room_in_the_host_pool_everything_is_computed_again(managers, num_host_blocks):
    """50 samples of a prompt, swapped out one after the other, all of which finish."""
    manager = managers(64, num_host_blocks=num_host_blocks)
    samples = [f"s{number}" for number in range(50)]
    compute(manager, "s0", range(20), OURS)
    manager.fork_sequences([ForkPlan("s0", name) for name in samples[1:]])
    for name in samples:
        manager.extend_sequences([ExtendPlan(name, 33)])
        manager.commit_blocks([CommitPlan(name, 33, 20, [int(name[1:])] * 13)])
        answer, copies, transfer = swap(manager, name)
        manager.complete_transfer(transfer, 0.0)
        if not num_host_blocks:
            assert (answer.mode, copies, transfer) == (SuspendMode.RECOMPUTE, [], 0)
            assert answer.reason == "there is no host pool"
    for name in samples:
        [back], _, transfer = manager.resume_sequences([name], runs_copies=True)
        assert back.length == 33
        manager.commit_blocks([CommitPlan(name, 33)])
        manager.complete_transfer(transfer, 0.0)
        manager.close_sequences([name])
    assert manager.stats().num_held == 0


@pytest.mark.parametrize("num_host_blocks", [12, 3, 0])
@pytest.mark.parametrize("has_heir", [False, True])
def test_s4_cancels_amid_a_swap_in_give_back_every_block(managers, num_host_blocks, has_heir):
    """100 groups, each cancelled when it is back and its copies are yet to be run.

    With an heir: the same update gives their blocks to somebody else. The first transfer, to
    the host pool, is completed before the swap-in, or after it, or only after the cancel.
    """
    manager = managers(10, num_host_blocks=num_host_blocks)
    compute(manager, "stays", range(5000, 5010), OURS)
    stays = manager.list_sequences()[0][0]
    room = available(manager)
    assert room == 8
    for number in range(100):
        names = swap_out_and_in(manager, number, completes_first=number % 3 == 0)
        if number % 3 == 1:
            complete_all(manager)
        before = manager.stats()
        # One first, whose copies bring what the others share.
        for closes in (names[:1], names[1:]):
            heirs = [OpenPlan(f"heir of {closes[0]}", range(9000, 9008), THEIRS)] * has_heir
            result = manager.update(Update(closes=closes, opens=heirs, runs_copies=True))
            assert result.refused == []
            assert available(manager) == result.num_available_blocks
            manager.close_sequences([heir.sequence_id for heir in heirs])
        assert available(manager) == room
        assert manager.stats().num_host_free >= before.num_host_free
        complete_all(manager)
        stats = manager.stats()
        assert stats.num_host_free + stats.num_host_cached == num_host_blocks
        assert manager.audit() == []
    assert manager.list_sequences()[0] == [stays]


def test_s4_a_member_that_is_cancelled_amid_its_groups_swap_in_takes_nothing_along(managers):
    """Its copies are run all the same: they bring what the others share with it."""
    manager = managers(10, num_host_blocks=12)
    for number in range(100):
        names = swap_out_and_in(manager, number, completes_first=True)
        tables = {one.sequence_id: one.block_ids for one in manager.list_sequences()[0]}
        gone = names[number % 3]
        result = manager.update(
            Update(
                commits=[CommitPlan(name, 20) for name in names if name != gone],
                closes=[gone],
                runs_copies=True,
            )
        )
        assert result.refused == []
        left = manager.list_sequences()[0]
        assert [one.sequence_id for one in left] == [name for name in names if name != gone]
        for one in left:
            assert one.block_ids == tables[one.sequence_id]
            assert one.num_computed_tokens == 20
        held = {block_id for one in left for block_id in one.block_ids}
        assert available(manager) == 10 - len(held) == 6
        manager.close_sequences(names)
        assert available(manager) == 10
        complete_all(manager)
        stats = manager.stats()
        assert stats.num_host_free + stats.num_host_cached == stats.num_host_blocks


def test_s4_a_driver_that_is_gone_amid_a_swap_in_leaves_every_block(managers):
    manager = managers(10, num_host_blocks=12)
    for number in range(100):
        names = swap_out_and_in(manager, number, completes_first=bool(number % 2))
        manager.acquire_driver_lease()  # what was on its way arrives no more
        manager.close_sequences(names)
        stats = manager.stats()
        assert available(manager) == 10
        assert stats.num_host_free + stats.num_host_cached == stats.num_host_blocks


def test_c13_free_memory_that_changes_meanwhile_changes_no_pool(monkeypatch):
    """The size is a number of bytes: nobody measures what another process leaves over."""
    options = ManagerOptions(16 * 8 * SHAPE.token_bytes, 8)
    readings = iter([10**12, 10**9, 10**11, 10**8])
    asked = []

    def available(directory: Path) -> int:
        asked.append(directory)
        return next(readings)

    monkeypatch.setattr(posix_pool, "_available_bytes", available)
    with tempfile.TemporaryDirectory(dir=SHM_DIRECTORY, prefix="test-") as folder:
        sizes = []
        for _ in range(3):
            manager = PageManager(options, PosixStorage("", Path(folder)))
            sizes.append(manager.attach_pool(SHAPE).size_bytes)
            manager.close()
    assert sizes == [options.kv_memory_bytes] * 3
    assert asked
