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
