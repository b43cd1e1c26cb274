"""Blocks past 2^31 elements: every offset into the pool has 64 bits."""

from __future__ import annotations

import mmap

import pytest
import torch

from compute.kernels.triton.copy_blocks import copy_blocks
from compute.kernels.triton.gather_blocks import gather_blocks, scatter_blocks
from compute.kernels.triton.paged_decode import paged_decode
from compute.kernels.triton.paged_prefill import paged_prefill
from compute.kernels.triton.rope_write_kv import rope_write_kv
from tests.unit.compute.triton.support import E4M3, ORACLE, assert_same_bits, randn, tolerance

BLOCK_ELEMENTS = 2 * 8 * 64
NUM_BLOCKS = 2**31 // BLOCK_ELEMENTS + 8
LAST = NUM_BLOCKS - 1
_NORESERVE = 0x4000  # MAP_NORESERVE of Linux, which mmap names from Python 3.13 on


@pytest.fixture
def make_far_pool(device):
    """make_far_pool(dtype): [P, 2, 8, 1, 64] of more than 2^31 elements, all zero.

    On the CPU of no memory but the pages that are written to.
    """

    def make(dtype: torch.dtype) -> torch.Tensor:
        num_bytes = NUM_BLOCKS * BLOCK_ELEMENTS * dtype.itemsize
        if device.type != "cpu":
            whole = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
            whole = torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)
        return whole.view(dtype).view(NUM_BLOCKS, 2, 8, 1, 64)

    return make


@pytest.mark.parametrize("kv_dtype", [torch.float16, E4M3, torch.int8])
def test_attention_reaches_far_blocks(device, make_far_pool, kv_dtype):
    kv = make_far_pool(kv_dtype)
    scales = None
    if kv_dtype != torch.float16:
        # Far as well: 2^31 elements and more between two blocks' scales, of pages untouched.
        scales = torch.ones(16, device=device).as_strided((NUM_BLOCKS, 2, 8, 1), (0, 8, 1, 1))
    qkv, angles = randn(2, 3 * 64, dtype=torch.float16), randn(2, 64, seed=1)
    slots = torch.tensor([LAST * 8 + 7, (LAST - 1) * 8])
    there = qkv.to(device)
    where = (angles.cos().to(device), angles.sin().to(device), slots.to(device))
    rope_write_kv(there, *where, kv, 1, None, scales)

    near = torch.zeros(2, 2, 8, 1, 64, dtype=torch.float32).to(kv_dtype)
    near_scales = None if scales is None else torch.ones(2, 2, 8, 1)
    near_slots = torch.tensor([7, 8])
    if near_scales is not None:
        near_scales = torch.ones(16).as_strided((2, 2, 8, 1), (0, 8, 1, 1))
    ORACLE.rope_write_kv(qkv, angles.cos(), angles.sin(), near_slots, near, 1, None, near_scales)
    far = kv[[LAST, LAST - 1]].cpu().float()
    step = {"rtol": 0.13, "atol": 1.1} if scales is not None else tolerance(torch.float16)
    torch.testing.assert_close(far, near.float(), **step)  # one step of a quantized number
    assert not kv[:8].view(torch.uint8).any()

    near = kv[[LAST, LAST - 1]].cpu()
    if scales is not None:
        near_scales = scales[:2].cpu()
    table = torch.tensor([[LAST, LAST - 1]], dtype=torch.int32, device=device)
    near_table = torch.tensor([[0, 1]], dtype=torch.int32)
    q = there.view(2, 3, 64)[:, :1].contiguous()
    length = torch.tensor([9], dtype=torch.int32)
    for run, expect, count, middle in [
        (paged_decode, ORACLE.paged_decode, 1, []),
        (paged_prefill, ORACLE.paged_prefill, 2, [torch.tensor([0, 2], dtype=torch.int32)]),
    ]:
        out = torch.empty(count, 1, 64, dtype=torch.float16, device=device)
        expected = torch.empty(count, 1, 64, dtype=torch.float16)
        rows = [x.to(device) for x in middle]
        run(q[:count], kv, table, *rows, length.to(device), 0.2, out, scales=scales)
        tail = (length, 0.2, expected)
        expect(q[:count].cpu(), near, near_table, *middle, *tail, scales=near_scales)
        torch.testing.assert_close(out.cpu(), expected, **tolerance(torch.float16))


def test_moves_reach_far_blocks(device, make_far_pool):
    pool = make_far_pool(E4M3)
    pool[LAST].view(torch.uint8).copy_(torch.arange(1024).view(2, 8, 1, 64) % 251)
    expected = pool[LAST].clone()
    copy_blocks(pool, [(LAST, LAST - 1), (LAST - 1, 3)])
    for block_id in (LAST, LAST - 1, 3):
        assert_same_bits(pool[block_id], expected)
    assert not pool[LAST - 2].view(torch.uint8).any()

    staging = torch.zeros(2, 2, 8, 1, 64, dtype=torch.uint8, device=device).view(E4M3)
    gather_blocks(pool, torch.tensor([0, LAST], device=device), staging)
    assert not staging[0].view(torch.uint8).any()
    assert_same_bits(staging[1], expected)
    scatter_blocks(pool, torch.tensor([LAST - 3, 5], device=device), staging.flip(0))
    assert_same_bits(pool[LAST - 3], expected)
