"""Kernels over paged KV: one interface, one implementation per device, one oracle.

Axes: T tokens in the step, N sequences, Hq and Hkv heads, D head size, B block
size, P blocks in the pool, M table width, E hidden size, I intermediate size.

`kv` is one layer of the pool as a strided view [P, 2, B, Hkv, D]: index 0 of the
second axis holds keys, 1 values. Offsets into it are 64-bit everywhere, since
P * stride passes 2^31 elements in real pools.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Kernels(Protocol):
    """The arithmetic that is not a matrix product. Tensors are of one dtype, fp32 or bf16,
    unless said otherwise; sums are accumulated in fp32. Outputs are written in place."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """out = x / sqrt(mean(x²) + eps) * weight. x, out [T, E]; weight [E]."""

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        """residual += x, then out = rms_norm(residual). All [T, E]."""

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """out = silu(gate_up[:, :I]) * gate_up[:, I:]. gate_up [T, 2I]; out [T, I]."""

    def rope_write_kv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv: torch.Tensor,
        num_q_heads: int,
    ) -> None:
        """Rotate queries and keys, and write keys and values into their slots.

        qkv           [T, (Hq + 2 Hkv) * D]  queries are rotated in place; keys and values
                                             are left as they were
        cos, sin      [T, D] fp32            rotate-half convention, both halves filled
        slot_mapping  [T] int64              block_id * B + offset of each token
        kv            [P, 2, B, Hkv, D]
        """

    def paged_decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Attend one query token per sequence over its paged KV, online softmax.

        q, out        [N, Hq, D]   may be strided over the first axis
        kv            [P, 2, B, Hkv, D]
        block_tables  [N, M] int32 entries past a sequence's length are never read
        seq_lens      [N] int32    tokens including this one, at least 1
        Source: Kwon et al. 2023, arXiv:2309.06180, section 4.3; Milakov and
        Gimelshein 2018, arXiv:1805.02867, for the online softmax.
        """

    def paged_prefill(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_table: torch.Tensor,
        seq_len: int,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Attend one sequence's chunk, causally, over its cached prefix and itself.

        q, out       [T, Hq, D]  the last T tokens of the sequence; may be strided over T
        kv           [P, 2, B, Hkv, D], the chunk's own keys and values included
        block_table  [M] int32
        seq_len      tokens including the chunk, at least T
        Works tile by tile over the table; the sequence's KV is never gathered whole.
        """

    def copy_blocks(self, pool: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) in order. pool [P, L, 2, B, Hkv, D]."""


__all__ = ["Kernels"]
