"""Blocks of a pool into and out of one dense buffer, for copies to and from the host.

One transfer of a dense buffer runs at the link's full rate where one per block does not.
The kernel is that of copy_blocks, with one side in order. Pinned memory, streams and
events are the caller's.
"""

from __future__ import annotations

import torch

from compute.kernels.triton.checks import check_same_device, words
from compute.kernels.triton.copy_blocks import as_words, move
from compute.kernels.triton.launch import Launch
from compute.kernels.triton.tuning import run_all


def gather_plan(pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> list[Launch]:
    source, target = _checked(pool, block_ids, staging)
    return [move(source, target, block_ids, None, block_ids.shape[0])]


def scatter_plan(
    pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor
) -> list[Launch]:
    target, source = _checked(pool, block_ids, staging)
    return [move(source, target, None, block_ids, block_ids.shape[0])]


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """staging[i] = pool[block_ids[i]].

    pool       [P, ...]  dense blocks
    block_ids  [K] int64 on the pool's device
    staging    [at least K, ...] dense blocks like the pool's; rows from K on stay
    Raises ValueError for tensors that do not fit; then nothing has run.
    """
    run_all(gather_plan(pool, block_ids, staging))


def scatter_blocks(pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """pool[block_ids[i]] = staging[i], for ids that differ; shapes as of gather_blocks."""
    run_all(scatter_plan(pool, block_ids, staging))


def _checked(
    pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if block_ids.dim() != 1 or block_ids.dtype != torch.int64 or not block_ids.is_contiguous():
        raise ValueError(f"{words('block_ids', block_ids)}: need a dense list of int64")
    if staging.shape[1:] != pool.shape[1:] or staging.dtype != pool.dtype:
        raise ValueError(
            f"{words('staging', staging)}: need blocks {tuple(pool.shape[1:])} {pool.dtype}"
        )
    if staging.shape[0] < block_ids.shape[0]:
        raise ValueError(f"{words('staging', staging)}: need room for {block_ids.shape[0]} blocks")
    check_same_device(pool, block_ids=block_ids, staging=staging)
    blocks, buffer = as_words("pool", pool), as_words("staging", staging)
    if blocks.element_size() != buffer.element_size():  # one of them is not aligned
        blocks, buffer = blocks.view(torch.uint8), buffer.view(torch.uint8)
    return blocks, buffer
