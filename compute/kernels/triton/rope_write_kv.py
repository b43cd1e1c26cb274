"""Norm, rotation and the write into slots, in one pass over queries, keys and values.

A program takes HEADS heads of one token, whichever they are: rows of a tile, each in two
halves, since the rotation pairs element i with element i + D/2. What becomes of a row is
decided by masks. All that a program needs of a row it has in registers, so qkv is read
once and nothing but queries and slots is written: memory limits.

Keys and values that are quantized are so in the same pass: the largest magnitude of a row
is already at hand. Division and rounding are those of the oracle, so that the bytes are
too, as long as the numbers before are.

Sources: Su et al. 2021, arXiv:2104.09864 (rotation); Zhang and Sennrich 2019,
arXiv:1910.07467 (RMSNorm).
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803 (constants of a kernel are in capitals)

import torch
import triton
import triton.language as tl

from compute.kernels import HeadNorms
from compute.kernels.triton.checks import (
    check_kv,
    check_list,
    check_rows,
    check_same_device,
)
from compute.kernels.triton.elements import raw, to_e4m3, to_int8
from compute.kernels.triton.launch import Config, Launch, Target, pieces, power_of_two, target_of
from compute.kernels.triton.tuning import run_all

_TILE = 2048  # elements of a program: 16 for each of 128 threads


@triton.jit
def rope_kernel(
    # pointers
    qkv,
    cos,
    sin,
    slot_mapping,
    q_norm,
    k_norm,
    kv,
    scales,
    # sizes
    num_q_heads,
    num_kv_heads,
    eps,
    # strides
    qkv_token,
    cos_token,
    sin_token,
    kv_block,
    kv_part,
    kv_token,
    kv_head,
    scales_block,
    scales_part,
    scales_token,
    scales_head,
    # constants
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    STORAGE: tl.constexpr,
    LARGEST: tl.constexpr,
    NORMS: tl.constexpr,
):
    """Program (token, HEADS heads)."""
    t = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, HALF_PAD)
    is_column = (columns < HALF)[None, :]
    is_q = heads < num_q_heads
    is_k = (heads >= num_q_heads) & (heads < num_q_heads + num_kv_heads)
    is_kv = (heads >= num_q_heads) & (heads < num_q_heads + 2 * num_kv_heads)
    is_cell = (is_q | is_kv)[:, None] & is_column

    at = qkv + t * qkv_token + heads[:, None] * (2 * HALF) + columns[None, :]
    first = tl.load(at, mask=is_cell, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=is_cell, other=0.0).to(tl.float32)
    turns = (is_q | is_k)[:, None]
    if NORMS:
        squares = tl.sum(first * first + second * second, axis=1) / (2 * HALF)
        factor = (1.0 / tl.sqrt_rn(squares + eps))[:, None]
        weight = tl.where(is_q[:, None], q_norm, k_norm) + columns[None, :]
        is_weight = turns & is_column
        first_weight = tl.load(weight, mask=is_weight, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + HALF, mask=is_weight, other=0.0).to(tl.float32)
        first = tl.where(turns, first * factor * first_weight, first)
        second = tl.where(turns, second * factor * second_weight, second)

    angle = columns[None, :]
    first_cos = tl.load(cos + t * cos_token + angle, mask=is_column, other=0.0)
    second_cos = tl.load(cos + t * cos_token + HALF + angle, mask=is_column, other=0.0)
    first_sin = tl.load(sin + t * sin_token + angle, mask=is_column, other=0.0)
    second_sin = tl.load(sin + t * sin_token + HALF + angle, mask=is_column, other=0.0)
    turned_first = tl.where(turns, first * first_cos - second * first_sin, first)
    turned_second = tl.where(turns, second * second_cos + first * second_sin, second)

    is_q_cell = is_q[:, None] & is_column
    tl.store(at, turned_first.to(qkv.dtype.element_ty), mask=is_q_cell)
    tl.store(at + HALF, turned_second.to(qkv.dtype.element_ty), mask=is_q_cell)

    slot = tl.load(slot_mapping + t)
    is_kept = is_kv & (slot >= 0)
    block_id = slot // BLOCK
    offset = slot % BLOCK
    part = tl.where(is_k, 0, 1).to(tl.int64)
    kv_head_id = heads - num_q_heads - tl.where(is_k, 0, num_kv_heads)
    if STORAGE != "plain":
        most = tl.max(tl.maximum(tl.abs(turned_first), tl.abs(turned_second)), axis=1)
        scale = tl.where(most > 0, tl.div_rn(most, LARGEST), 1.0)
        scales_at = scales + block_id * scales_block + part * scales_part
        scales_at += offset * scales_token + kv_head_id.to(tl.int64) * scales_head
        tl.store(scales_at, scale, mask=is_kept)
        divisor = tl.broadcast_to(scale[:, None], [HEADS, HALF_PAD])
        turned_first = tl.div_rn(turned_first, divisor)
        turned_second = tl.div_rn(turned_second, divisor)
    if STORAGE == "int8":
        stored_first = to_int8(turned_first)
        stored_second = to_int8(turned_second)
    elif STORAGE == "e4m3":
        stored_first = to_e4m3(turned_first)
        stored_second = to_e4m3(turned_second)
    else:
        stored_first = turned_first.to(kv.dtype.element_ty)
        stored_second = turned_second.to(kv.dtype.element_ty)
    rows = block_id * kv_block + part * kv_part
    rows += offset * kv_token + kv_head_id.to(tl.int64) * kv_head
    kept_at = kv + rows[:, None] + columns[None, :]
    is_kept_cell = is_kept[:, None] & is_column
    tl.store(kept_at, stored_first, mask=is_kept_cell)
    tl.store(kept_at + HALF, stored_second, mask=is_kept_cell)


def plan(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv: torch.Tensor,
    num_q_heads: int,
    norms: HeadNorms | None = None,
    scales: torch.Tensor | None = None,
    target: Target | None = None,
) -> list[Launch]:
    """The launch of Kernels.rope_write_kv, whose docstring has the shapes.

    Raises ValueError for tensors that do not fit. Nothing runs.
    """
    target = target or target_of(qkv)
    shape = check_kv(kv, qkv.dtype, scales, target)
    head_size, num_kv_heads = shape.head_size, shape.num_kv_heads
    num_tokens = qkv.shape[0]
    num_heads = num_q_heads + 2 * num_kv_heads
    check_rows("qkv", qkv, (num_tokens, num_heads * head_size), qkv.dtype)
    check_rows("cos", cos, (num_tokens, head_size), torch.float32)
    check_rows("sin", sin, (num_tokens, head_size), torch.float32)
    check_list("slot_mapping", slot_mapping, (num_tokens,), torch.int64)
    check_same_device(qkv, cos=cos, sin=sin, slot_mapping=slot_mapping, kv=kv, scales=scales)
    if norms is not None:
        check_list("norms.q", norms.q, (head_size,), qkv.dtype)
        check_list("norms.k", norms.k, (head_size,), qkv.dtype)
        check_same_device(qkv, q_norm=norms.q, k_norm=norms.k)
    half_pad = power_of_two(head_size // 2)
    heads = max(1, min(_TILE // (2 * half_pad), power_of_two(num_heads)))
    scales_strides = (0, 0, 0, 0) if scales is None else scales.stride()
    launch = Launch(
        rope_kernel,
        (num_tokens, pieces(num_heads, heads)),
        {
            "qkv": qkv,
            "cos": cos,
            "sin": sin,
            "slot_mapping": slot_mapping,
            "q_norm": qkv if norms is None else norms.q,
            "k_norm": qkv if norms is None else norms.k,
            "kv": raw(kv),
            "scales": cos if scales is None else scales,
            "num_q_heads": num_q_heads,
            "num_kv_heads": num_kv_heads,
            "eps": 0.0 if norms is None else norms.eps,
            "qkv_token": qkv.stride(0),
            "cos_token": cos.stride(0),
            "sin_token": sin.stride(0),
            "kv_block": kv.stride(0),
            "kv_part": kv.stride(1),
            "kv_token": kv.stride(2),
            "kv_head": kv.stride(3),
            "scales_block": scales_strides[0],
            "scales_part": scales_strides[1],
            "scales_token": scales_strides[2],
            "scales_head": scales_strides[3],
            "HEADS": heads,
            "HALF": head_size // 2,
            "HALF_PAD": half_pad,
            "BLOCK": shape.block_size,
            # Bytes are written the same way everywhere: rarely enough not to matter.
            "STORAGE": "e4m3" if shape.storage == "e4m3_native" else shape.storage,
            "LARGEST": 448.0 if kv.dtype == torch.float8_e4m3fn else 127.0,
            "NORMS": norms is not None,
        },
        Config(4),
        heads * head_size * (qkv.element_size() + max(qkv.element_size(), kv.element_size())),
    )
    return [launch]


def rope_write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv: torch.Tensor,
    num_q_heads: int,
    norms: HeadNorms | None = None,
    scales: torch.Tensor | None = None,
) -> None:
    """Kernels.rope_write_kv. Raises ValueError for tensors that do not fit; then nothing
    has run."""
    run_all(plan(qkv, cos, sin, slot_mapping, kv, num_q_heads, norms, scales))
