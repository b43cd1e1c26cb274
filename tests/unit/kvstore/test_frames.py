"""Reference counts and the free list."""

from __future__ import annotations

import pytest

from kvstore.block_pool import BlockPool
from kvstore.errors import OutOfBlocks
from kvstore.frames import Frames
from kvstore.types import Namespace


def counters(frames: Frames) -> tuple[int, int, int]:
    return frames.num_free, frames.num_cached, frames.num_held


def test_take_is_all_or_nothing():
    frames = Frames(3)
    frames.take(2)
    with pytest.raises(OutOfBlocks):
        frames.take(2)
    assert counters(frames) == (1, 0, 2)


def test_a_block_is_released_as_often_as_it_is_held():
    frames = Frames(2)
    (block,) = frames.take(1)
    frames.hold([block])
    frames.release(block)
    assert counters(frames) == (1, 0, 1)
    frames.release(block)
    assert counters(frames) == (2, 0, 0)


def test_a_double_release_is_refused():
    """Fault C10."""
    frames = Frames(2)
    (block,) = frames.take(1)
    frames.release(block)
    with pytest.raises(ValueError, match="not held"):
        frames.release(block)
    assert counters(frames) == (2, 0, 0)
    assert sorted(frames.free_list()) == [0, 1]


def test_a_cached_block_cannot_be_released_again():
    frames = Frames(1)
    (block,) = frames.take(1)
    frames.set_findable(block)
    frames.release(block)
    with pytest.raises(ValueError, match="not held"):
        frames.release(block)
    assert counters(frames) == (0, 1, 0)
    assert frames.cached_list() == [block]


def test_a_table_that_lists_a_block_twice_is_not_released_at_all():
    """Fault C10: release([b, b])."""
    pool = BlockPool(4)
    chain = pool.hold(Namespace(b"m"), [])
    first, second = pool.allocate(2)
    for table in ([first, first], [first, second, 3]):
        with pytest.raises(ValueError, match="block"):
            pool.release(chain, table)
        assert counters(pool.frames) == (2, 0, 2)
    pool.release(chain, [first, second])
    assert counters(pool.frames) == (4, 0, 0)


def test_a_free_block_cannot_be_held():
    frames = Frames(2)
    (block,) = frames.take(1)
    with pytest.raises(ValueError, match="free"):
        frames.hold([block, 1])
    assert frames.ref_counts == [1, 0]
    with pytest.raises(ValueError, match="not held"):
        frames.set_findable(1)
    assert not frames.is_findable(1)


def test_the_generation_changes_whenever_a_block_leaves_the_free_list():
    frames = Frames(1)
    seen = [frames.generations[0]]
    (block,) = frames.take(1)
    seen.append(frames.generations[0])
    frames.hold([block])
    frames.set_findable(block)
    frames.release(block)
    frames.release(block)
    assert frames.generations[0] == seen[-1]  # neither sharing nor releasing changes it
    frames.hold([block])
    seen.append(frames.generations[0])
    assert len(set(seen)) == len(seen)


def test_cached_blocks_are_in_the_order_of_their_last_use():
    frames = Frames(4)
    blocks = frames.take(4)
    for block in blocks:
        frames.set_findable(block)
        frames.release(block)
    assert frames.cached_list() == blocks
    frames.touch(blocks[1])
    frames.hold([blocks[0]])
    frames.release(blocks[0])
    assert frames.cached_list() == [blocks[2], blocks[3], blocks[1], blocks[0]]
    assert frames.oldest_cached == blocks[2]
    assert frames.forget(blocks[3])
    assert frames.cached_list() == [blocks[2], blocks[1], blocks[0]]
    assert counters(frames) == (1, 3, 0)


def test_allocation_beyond_the_pool_evicts_nothing():
    pool = BlockPool(2)
    chain = pool.hold(Namespace(b"m"), [])
    blocks = pool.allocate(2)
    pool.register(chain, blocks, [b"one", b"two"])
    pool.release(chain, blocks)
    with pytest.raises(OutOfBlocks):
        pool.allocate(3)
    assert counters(pool.frames) == (0, 2, 0)
    assert pool.match(Namespace(b"m"), [b"one", b"two"]) == blocks
