"""What a kernel relies on, checked before it runs on raw memory. All raise ValueError."""

from __future__ import annotations

from typing import NamedTuple

import torch

from compute.kernels import AttentionOptions
from compute.kernels.triton.launch import Target

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
QUANTIZED = (torch.float8_e4m3fn, torch.int8)
BLOCK_SIZES = (8, 16, 32)
MAX_HEAD_SIZE = 256


class KvShape(NamedTuple):
    """One layer of the pool, and how its elements are stored.

    storage  "plain", "int8", "e4m3" (its bits taken apart) or "e4m3_native"
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    storage: str


def check_rows(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A matrix whose rows may lie apart."""
    if x.dim() != 2 or x.shape != shape or x.dtype != dtype or dtype not in FLOATS:
        raise ValueError(f"{words(name, x)}: need rows {tuple(shape)} {dtype}, of 16 or 32 bits")
    if x.stride(1) != 1:
        raise ValueError(f"{words(name, x)}: need dense rows, stride(1) is {x.stride(1)}")


def check_list(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A dense tensor."""
    if x.shape != shape or x.dtype != dtype or not x.is_contiguous():
        raise ValueError(f"{words(name, x)}: need dense {tuple(shape)} {dtype}")


def check_same_device(first: torch.Tensor, **others: torch.Tensor | None) -> None:
    for name, x in others.items():
        if x is not None and x.device != first.device:
            raise ValueError(f"{name} is on {x.device}: need it on {first.device}")


def check_kv(
    kv: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None, target: Target
) -> KvShape:
    """One layer of the pool: in the dtype of the activations, or quantized with scales."""
    if kv.dim() != 5 or kv.shape[1] != 2 or kv.stride(4) != 1:
        raise ValueError(f"{words('kv', kv)}: need [P, 2, B, Hkv, D] with dense heads")
    _, _, block_size, num_kv_heads, head_size = kv.shape
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"{words('kv', kv)}: need a block size of {BLOCK_SIZES}")
    if head_size % 16 or not 16 <= head_size <= MAX_HEAD_SIZE:
        raise ValueError(f"{words('kv', kv)}: need D in multiples of 16 up to {MAX_HEAD_SIZE}")
    if kv.dtype not in QUANTIZED:
        if kv.dtype != dtype:
            raise ValueError(f"{words('kv', kv)}: need {dtype} or one of {QUANTIZED}")
        if scales is not None:
            raise ValueError(f"{words('kv', kv)}: need no scales, it is not quantized")
        return KvShape(block_size, num_kv_heads, head_size, "plain")
    if scales is None:
        raise ValueError(f"{words('kv', kv)}: need scales, it is quantized")
    if scales.shape != kv.shape[:4] or scales.dtype != torch.float32:
        raise ValueError(f"{words('scales', scales)}: need {tuple(kv.shape[:4])} fp32")
    storage = "int8"
    if kv.dtype == torch.float8_e4m3fn:
        storage = "e4m3_native" if target.converts_fp8 else "e4m3"
    return KvShape(block_size, num_kv_heads, head_size, storage)


def check_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    options: AttentionOptions,
    scales: torch.Tensor | None,
    target: Target,
) -> KvShape:
    shape = check_kv(kv, q.dtype, scales, target)
    if q.dim() != 3 or q.shape[2] != shape.head_size or q.shape[1] % shape.num_kv_heads:
        raise ValueError(
            f"{words('q', q)}: need [N, Hq, {shape.head_size}], "
            f"Hq a multiple of {shape.num_kv_heads}"
        )
    for name, x in (("q", q), ("out", out)):
        if x.dtype != q.dtype or q.dtype not in FLOATS or x.shape != q.shape:
            raise ValueError(f"{words(name, x)}: need {tuple(q.shape)} fp32, bf16 or fp16")
        if x.stride()[1:] != (shape.head_size, 1):
            raise ValueError(f"{name}: need the heads of a token one after the other")
    if options.window < 0 or options.softcap < 0:
        raise ValueError(f"{options}: need a window and a cap of 0 or more")
    if options.slopes is not None:
        check_list("slopes", options.slopes, (q.shape[1],), torch.float32)
    check_same_device(q, kv=kv, out=out, scales=scales, slopes=options.slopes)
    return shape


def check_tables(block_tables: torch.Tensor, num_sequences: int) -> None:
    if (
        block_tables.dim() != 2
        or block_tables.shape[0] != num_sequences
        or block_tables.dtype != torch.int32
        or block_tables.stride(1) != 1
    ):
        raise ValueError(
            f"{words('block_tables', block_tables)}: need one dense int32 row for each of "
            f"{num_sequences} sequences"
        )


def words(name: str, x: torch.Tensor) -> str:
    return f"{name} {tuple(x.shape)} {x.dtype}"
