"""Copies to and from the host pool."""

from __future__ import annotations

import pytest
import torch

from compute.block_copies import run_copies
from compute.kernels.reference import ReferenceKernels
from compute.types import BlockCopy


@pytest.fixture
def pools():
    """A page pool of four blocks and a host pool of three, each block full of its own id."""
    ids = torch.arange(7, dtype=torch.float32).view(7, 1, 1, 1, 1, 1)
    blocks = ids.expand(7, 2, 2, 8, 1, 4).clone()
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
