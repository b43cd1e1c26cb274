"""Copies between blocks of the page pool and of the host pool."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from compute.kernels import Kernels
from compute.types import BlockCopy


def run_copies(
    kernels: Kernels, pool: torch.Tensor, host: torch.Tensor | None, copies: Sequence[BlockCopy]
) -> None:
    """Run checked copies in their order; neighbours within the page pool in one call.

    Blocks are copied as they are, with the scales that quantized KV has behind it.

    pool  [P, block_bytes] uint8
    host  [H, block_bytes] uint8; its blocks have the ids from P on
    """
    num_blocks = pool.shape[0]

    def block(block_id: int) -> torch.Tensor:
        if block_id < num_blocks:
            return pool[block_id]
        assert host is not None
        return host[block_id - num_blocks]

    for is_inside, group in groupby(copies, lambda copy: _is_inside(copy, num_blocks)):
        if is_inside:
            kernels.copy_blocks(pool, [(copy.source, copy.target) for copy in group])
            continue
        for copy in group:
            block(copy.target).copy_(block(copy.source))


def _is_inside(copy: BlockCopy, num_blocks: int) -> bool:
    return copy.source < num_blocks and copy.target < num_blocks
