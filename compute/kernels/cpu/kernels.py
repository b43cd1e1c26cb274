"""The interface of compute.kernels on the CPU: check the tensors, call the kernel."""

from __future__ import annotations

import struct
from typing import Any

import torch

from compute import threads
from compute.kernels.cpu import decode, rope, rows

# Fewer multiplications than this and waking the other threads costs more than it gains.
_WORTH_SHARING = 16_384
_DTYPES = (torch.float32, torch.bfloat16)


class CpuKernels:
    """Meets compute.kernels.Kernels; results equal the oracle's up to rounding.

    Owns scratch memory that grows to the largest call; one thread at a time.
    """

    def __init__(self) -> None:
        self._team = threads.team()
        self._partials = torch.empty(0)
        self._tiles = torch.empty(self._team.num_threads, 0)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        self._norm(x, None, weight, eps, out)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        self._norm(x, residual, weight, eps, out)

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        num_rows, size = out.shape
        _check_rows("gate_up", gate_up, (num_rows, 2 * size), out.dtype)
        _check_rows("out", out, (num_rows, size), out.dtype)
        self._run(
            rows.silu_mul_kernel(out.dtype == torch.bfloat16),
            8 * num_rows * size,
            "6q",
            gate_up.data_ptr(),
            gate_up.stride(0),
            out.data_ptr(),
            out.stride(0),
            num_rows,
            size,
        )

    def rope_write_kv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv: torch.Tensor,
        num_q_heads: int,
    ) -> None:
        block_size, num_kv_heads, head_size = _check_kv(kv, qkv.dtype)
        num_tokens = qkv.shape[0]
        width = (num_q_heads + 2 * num_kv_heads) * head_size
        _check_rows("qkv", qkv, (num_tokens, width), qkv.dtype)
        _check_rows("cos", cos, (num_tokens, head_size), torch.float32)
        _check_rows("sin", sin, (num_tokens, head_size), torch.float32)
        _check_list("slot_mapping", slot_mapping, (num_tokens,), torch.int64)
        self._run(
            rope.rope_write_kv_kernel(head_size, block_size, qkv.dtype == torch.bfloat16),
            num_tokens * width,
            "15q",
            qkv.data_ptr(),
            qkv.stride(0),
            cos.data_ptr(),
            cos.stride(0),
            sin.data_ptr(),
            sin.stride(0),
            slot_mapping.data_ptr(),
            kv.data_ptr(),
            *kv.stride()[:4],
            num_tokens,
            num_q_heads,
            num_kv_heads,
        )

    def paged_decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        num_sequences = q.shape[0]
        _check_list("seq_lens", seq_lens, (num_sequences,), torch.int32)
        if block_tables.dim() != 2 or block_tables.shape[0] != num_sequences:
            raise ValueError(f"block_tables {tuple(block_tables.shape)}: one row per sequence")
        self._decode(q, kv, block_tables, seq_lens, scale, out)

    def paged_prefill(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_table: torch.Tensor,
        seq_len: int,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        first = seq_len - q.shape[0] + 1
        seq_lens = torch.arange(first, seq_len + 1, dtype=torch.int32)
        self._decode(q, kv, block_table.expand(q.shape[0], -1), seq_lens, scale, out)

    def copy_blocks(self, pool: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            pool[target].copy_(pool[source])

    def _norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        shape = out.shape
        _check_rows("x", x, shape, out.dtype)
        _check_rows("out", out, shape, out.dtype)
        _check_list("weight", weight, shape[1:], out.dtype)
        if residual is not None:
            _check_rows("residual", residual, shape, out.dtype)
        added_to = x if residual is None else residual
        num_rows, size = shape
        self._run(
            rows.rms_norm_kernel(size, out.dtype == torch.bfloat16, residual is not None),
            num_rows * size,
            "8qd",
            x.data_ptr(),
            x.stride(0),
            added_to.data_ptr(),
            added_to.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            num_rows,
            eps,
        )

    def _decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        block_size, num_kv_heads, head_size = _check_kv(kv, q.dtype)
        num_sequences, num_q_heads = q.shape[0], q.shape[1]
        if num_q_heads % num_kv_heads:
            raise ValueError(f"{num_q_heads} query heads over {num_kv_heads} KV heads")
        _check_heads("q", q, (num_sequences, num_q_heads, head_size), q.dtype)
        _check_heads("out", out, (num_sequences, num_q_heads, head_size), q.dtype)
        if block_tables.dtype != torch.int32 or block_tables.stride(1) != 1:
            raise ValueError("block_tables must be int32 with dense rows")
        bf16 = q.dtype == torch.bfloat16
        max_length = block_tables.shape[1] * block_size
        max_pieces = -(-max_length // decode.PIECE)
        self._reserve(
            decode.partial_floats(num_sequences * max_pieces, num_q_heads, head_size),
            decode.scratch_floats(block_size, num_q_heads, head_size),
        )
        work = num_sequences * max_length * num_q_heads * head_size
        self._run(
            decode.paged_decode_kernel(head_size, num_q_heads // num_kv_heads, block_size, bf16),
            work,
            "14qd4q",
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            out.stride(0),
            kv.data_ptr(),
            *kv.stride()[:4],
            block_tables.data_ptr(),
            block_tables.stride(0),
            seq_lens.data_ptr(),
            num_sequences,
            num_kv_heads,
            scale,
            self._partials.data_ptr(),
            max_pieces,
            self._tiles.data_ptr(),
            self._tiles.stride(0),
        )
        self._run(
            decode.merge_kernel(head_size, bf16),
            num_sequences * num_q_heads * head_size,
            "7q",
            out.data_ptr(),
            out.stride(0),
            seq_lens.data_ptr(),
            num_sequences,
            num_q_heads,
            self._partials.data_ptr(),
            max_pieces,
        )

    def _reserve(self, partial_floats: int, tile_floats: int) -> None:
        if self._partials.shape[0] < partial_floats:
            self._partials = torch.empty(partial_floats)
        if self._tiles.shape[1] < tile_floats:
            self._tiles = torch.empty(self._team.num_threads, tile_floats)

    def _run(self, compiled: Any, work: int, layout: str, *arguments: float) -> None:
        team = self._team
        if work < _WORTH_SHARING or team.num_threads == 1:
            team.run_alone(compiled.address, struct.pack("2q" + layout, 0, 1, *arguments))
        else:
            packed = struct.pack("2q" + layout, team.thread_number, team.num_threads, *arguments)
            team.run(compiled.address, packed)


def _check_kv(kv: torch.Tensor, dtype: torch.dtype) -> tuple[int, int, int]:
    """Block size, KV heads and head size of one layer of the pool."""
    if kv.dim() != 5 or kv.shape[1] != 2 or kv.stride(4) != 1:
        raise ValueError(f"kv {tuple(kv.shape)} is not [P, 2, B, Hkv, D] with dense heads")
    if kv.dtype != dtype:
        raise ValueError(f"kv is {kv.dtype}, the activations are {dtype}")
    _, _, block_size, num_kv_heads, head_size = kv.shape
    if head_size % 8:
        raise ValueError(f"head size {head_size} is not a multiple of 8")
    return block_size, num_kv_heads, head_size


def _check_rows(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if x.shape != shape or x.dtype != dtype or x.stride(1) != 1:
        raise ValueError(f"{name} {tuple(x.shape)} {x.dtype}: need dense rows {shape} {dtype}")
    if dtype not in _DTYPES:
        raise ValueError(f"{name} is {dtype}: need fp32 or bf16")


def _check_heads(
    name: str, x: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    if x.dtype not in _DTYPES or x.dtype != dtype or x.shape != shape:
        raise ValueError(f"{name} {tuple(x.shape)} {x.dtype}: need {shape} {dtype}, fp32 or bf16")
    if x.stride(2) != 1 or x.stride(1) != shape[2]:
        raise ValueError(f"{name}: the heads of a token must lie one after the other")


def _check_list(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if x.shape != shape or x.dtype != dtype or not x.is_contiguous():
        raise ValueError(f"{name} {tuple(x.shape)} {x.dtype}: need {tuple(shape)} {dtype}, dense")
