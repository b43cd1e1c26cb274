"""What a kernel relies on, checked before it runs on raw memory. All raise ValueError."""

from __future__ import annotations

from typing import NamedTuple

import torch

_DTYPES = (torch.float32, torch.bfloat16)


class AttentionShape(NamedTuple):
    """What attention kernels are compiled for, and the number of KV heads."""

    block_size: int
    num_kv_heads: int
    group: int  # query heads per KV head
    bf16: bool


def check_rows(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A matrix, fp32 or bf16, whose rows may lie apart."""
    if x.shape != shape or x.dtype != dtype or dtype not in _DTYPES or x.stride(1) != 1:
        raise ValueError(f"{_words(name, x)}: need dense rows, {tuple(shape)} {dtype}")


def check_list(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A dense tensor."""
    if x.shape != shape or x.dtype != dtype or not x.is_contiguous():
        raise ValueError(f"{_words(name, x)}: need dense {tuple(shape)} {dtype}")


def check_tables(block_tables: torch.Tensor, num_sequences: int) -> None:
    if (
        block_tables.dim() != 2
        or block_tables.shape[0] != num_sequences
        or block_tables.dtype != torch.int32
        or block_tables.stride(1) != 1
    ):
        words = _words("block_tables", block_tables)
        raise ValueError(f"{words}: need one dense int32 row for each of {num_sequences} sequences")


def check_chunks(rows: list[int], lengths: list[int], num_rows: int, capacity: int) -> None:
    """Chunks that lie one after the other, in sequences that hold them."""
    if rows[0] != 0 or rows[-1] != num_rows:
        raise ValueError(f"first_rows {rows}: need 0 first and the {num_rows} rows of q last")
    for first, end, length in zip(rows[:-1], rows[1:], lengths, strict=True):
        if not 0 < end - first <= length <= capacity:
            raise ValueError(
                f"seq_len {length}: not between {end - first} tokens of the chunk and "
                f"{capacity} of the block table"
            )


def check_kv(kv: torch.Tensor, dtype: torch.dtype) -> None:
    """One layer of the pool, in the dtype of the activations."""
    if kv.dim() != 5 or kv.shape[1] != 2 or kv.stride(4) != 1 or kv.dtype != dtype:
        raise ValueError(f"{_words('kv', kv)}: need [P, 2, B, Hkv, D] {dtype} with dense heads")
    if kv.shape[2] % 8 or kv.shape[4] % 8:
        raise ValueError(f"{_words('kv', kv)}: need B and D in multiples of 8")


def check_attention(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> AttentionShape:
    dtype = q.dtype
    check_kv(kv, dtype)
    _, _, block_size, num_kv_heads, head_size = kv.shape
    if q.dim() != 3 or q.shape[2] != head_size or q.shape[1] % num_kv_heads:
        raise ValueError(
            f"{_words('q', q)}: need [N, Hq, {head_size}], Hq a multiple of {num_kv_heads}"
        )
    for name, x in (("q", q), ("out", out)):
        if x.dtype != dtype or dtype not in _DTYPES or x.shape != q.shape:
            raise ValueError(f"{_words(name, x)}: need {tuple(q.shape)} fp32 or bf16")
        if x.stride()[1:] != (head_size, 1):
            raise ValueError(f"{name}: the heads of a token must lie one after the other")
    group = q.shape[1] // num_kv_heads
    return AttentionShape(block_size, num_kv_heads, group, dtype == torch.bfloat16)


def _words(name: str, x: torch.Tensor) -> str:
    return f"{name} {tuple(x.shape)} {x.dtype}"
