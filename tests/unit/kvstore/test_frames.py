"""Reference counts and the free list."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from kvstore.block_pool import BlockPool
from kvstore.errors import OutOfBlocks
from kvstore.frame_records import NO_PARENT, FrameRecords
from kvstore.frames import Frames
from kvstore.prefix_tree import Chain
from kvstore.types import Namespace

SPACE = Namespace(b"m")


def counters(frames: Frames) -> tuple[int, int, int]:
    return frames.num_free, frames.num_cached, frames.num_held


def remember(frames: Frames, block_ids) -> None:
    frames.remember(block_ids, NO_PARENT, 0, bytes(len(block_ids) * 8 * 4))


def test_take_is_all_or_nothing():
    frames = Frames(FrameRecords(3, 8))
    frames.take(2)
    with pytest.raises(OutOfBlocks):
        frames.take(2)
    assert counters(frames) == (1, 0, 2)


def test_blocks_come_lowest_first_and_the_last_one_released_again_first():
    frames = Frames(FrameRecords(4, 8))
    assert frames.take(3).tolist() == [0, 1, 2]
    frames.release(np.array([2, 0]))
    assert frames.take(2).tolist() == [0, 2]


def test_a_block_is_released_as_often_as_it_is_held():
    frames = Frames(FrameRecords(2, 8))
    block = frames.take(1)
    frames.hold(block)
    frames.release(block)
    assert counters(frames) == (1, 0, 1)
    frames.release(block)
    assert counters(frames) == (2, 0, 0)


def test_a_double_release_is_refused():
    """Fault C10."""
    frames = Frames(FrameRecords(3, 8))
    blocks = frames.take(2)
    frames.release(blocks[:1])
    with pytest.raises(ValueError, match="not held"):
        frames.release(blocks)
    assert counters(frames) == (2, 0, 1)
    assert sorted(frames.device.free_list()) == [0, 2]


def test_a_cached_block_cannot_be_released_again():
    frames = Frames(FrameRecords(1, 8))
    block = frames.take(1)
    remember(frames, block)
    frames.release(block)
    with pytest.raises(ValueError, match="not held"):
        frames.release(block)
    assert counters(frames) == (0, 1, 0)
    assert frames.findable.tolist() == [True]


def test_a_table_that_lists_a_block_twice_is_not_released_at_all():
    """Fault C10: release([b, b])."""
    pool = BlockPool(FrameRecords(4, 8))
    first, second = pool.allocate(2, pool.tenants.get(""))
    for table in ([first, first], [first, second, 3]):
        with pytest.raises(ValueError, match="block"):
            pool.release(Chain(SPACE), array("i", table))
        assert counters(pool.frames) == (2, 0, 2)
    pool.release(Chain(SPACE), array("i", [first, second]))
    assert counters(pool.frames) == (4, 0, 0)


def test_a_free_block_cannot_be_held():
    frames = Frames(FrameRecords(2, 8))
    block = frames.take(1)
    with pytest.raises(ValueError, match="free"):
        frames.hold(np.array([*block, 1]))
    assert frames.ref_counts.tolist() == [1, 0]
    with pytest.raises(ValueError, match="not held"):
        remember(frames, np.array([0, 1]))
    assert not frames.findable.any()


def test_the_generation_changes_whenever_a_block_leaves_the_free_list():
    frames = Frames(FrameRecords(1, 8))
    seen = [frames.generations[0]]
    block = frames.take(1)
    seen.append(frames.generations[0])
    frames.hold(block)
    remember(frames, block)
    frames.release(block)
    frames.release(block)
    frames.hold(block)  # its KV is still the same
    frames.release(block)
    assert frames.generations[0] == seen[-1]
    assert frames.forget(block) == 1
    frames.take(1)
    seen.append(frames.generations[0])
    assert len(set(seen)) == len(seen)


def test_forgetting_frees_what_is_cached_and_leaves_what_is_held():
    frames = Frames(FrameRecords(3, 8))
    blocks = frames.take(3)
    remember(frames, blocks)
    frames.release(blocks[:2])
    assert frames.forget(blocks) == 2
    assert counters(frames) == (2, 0, 1)
    frames.release(blocks[2:])
    assert counters(frames) == (3, 0, 0)


def test_allocation_beyond_the_pool_evicts_nothing():
    pool = BlockPool(FrameRecords(2, 8))
    data = bytes(range(64))
    chain, blocks = Chain(SPACE), pool.allocate(2, pool.tenants.get(""))
    pool.register(chain, blocks, data)
    pool.release(chain, blocks)
    with pytest.raises(OutOfBlocks):
        pool.allocate(3, pool.tenants.get(""))
    assert counters(pool.frames) == (0, 2, 0)
    assert pool.match(SPACE, data)[1] == blocks
