"""Copies to and from the host pool."""

from __future__ import annotations

import pytest
import torch

from compute.block_copies import run_copies
from compute.kernels.reference import ReferenceKernels
from compute.pool import AttachedPool
from compute.types import BlockCopy, KvShape

BLOCK_BYTES = 64


@pytest.fixture
def pools():
    """A page pool of four blocks and a host pool of three, each block full of its own id."""
    ids = torch.arange(7, dtype=torch.uint8).view(7, 1)
    blocks = ids.expand(7, BLOCK_BYTES).clone()
    return blocks[:4].clone(), blocks[4:].clone()


def contents(pools) -> list[float]:
    for pool in pools:
        assert all(block.unique().numel() == 1 for block in pool)
    return [float(block.flatten()[0]) for pool in pools for block in pool]


def test_copies_cross_between_the_pools_in_their_order(pools):
    copies = [(0, 4), (5, 0), (1, 2), (2, 3), (6, 2), (4, 1), (4, 5)]
    run_copies(ReferenceKernels(), *pools, [BlockCopy(*pair) for pair in copies])
    expected = list(range(7))
    for source, target in copies:
        expected[target] = expected[source]
    assert contents(pools) == expected


def test_without_a_host_pool_copies_stay_within_the_page_pool(pools):
    run_copies(ReferenceKernels(), pools[0], None, [BlockCopy(3, 0)])
    assert contents(pools) == [3, 1, 2, 3, 4, 5, 6]


def test_scales_travel_with_their_elements(make_pool):
    shape = KvShape(num_layers=2, num_kv_heads=2, head_size=8, dtype="int8")
    pool, host = (
        AttachedPool(make_pool(num_blocks=count, block_size=8).attach_pool(shape), shape)
        for count in (3, 2)
    )
    pool.tensor[1] = torch.randint(-127, 128, pool.tensor[1].shape, dtype=torch.int8)
    pool.scales[1] = torch.rand(pool.scales[1].shape)
    elements, scales = pool.tensor[1].clone(), pool.scales[1].clone()
    copies = [BlockCopy(1, 4), BlockCopy(4, 2), BlockCopy(2, 0)]
    run_copies(ReferenceKernels(), pool.blocks, host.blocks, copies)
    for attached, block in ((host, 1), (pool, 2), (pool, 0)):
        assert torch.equal(attached.tensor[block], elements)
        assert torch.equal(attached.scales[block], scales)
    assert not host.blocks[0].any()
    pool.close()
    host.close()
