"""Kernels over paged KV: one interface, one implementation per device, one oracle.

Axes: T tokens in the step, N sequences, Hq and Hkv heads, D head size, B block
size, P blocks in the pool, M table width, E hidden size, I intermediate size.

`kv` is one layer of the pool as a strided view [P, 2, B, Hkv, D]: index 0 of the
second axis holds keys, 1 values. Offsets into it are 64-bit everywhere, since
P * stride passes 2^31 elements in real pools.

KV of one byte per element (fp8 e4m3 or int8) has scales beside it, a strided view
[P, 2, B, Hkv] in fp32: an element is worth kv * scales. A token's head is stored with
scale = max|x| / the largest number of the type (448 or 127), or 1 if it is all zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

# gelu: with the error function; gelu_tanh: its approximation by a hyperbolic tangent
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What some families change about attention; the defaults change nothing.

    window   tokens that a query sees, itself included; 0: all before it
    softcap  scores s become softcap * tanh(s / softcap); 0: as they are
    slopes   [Hq] fp32, ALiBi: slope * (key position - query position) is added to scores

    Sources: Beltagy et al. 2020, arXiv:2004.05150 (windows); Gemma Team 2024,
    arXiv:2408.00118 (caps); Press et al. 2022, arXiv:2108.12409 (ALiBi).
    """

    window: int = 0
    softcap: float = 0.0
    slopes: torch.Tensor | None = None


PLAIN = AttentionOptions()


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm over each head of queries and keys, before positions: q, k [D]."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


class Kernels(Protocol):
    """The arithmetic that is not a matrix product. Tensors are of one dtype (fp32, bf16 or
    fp16, whichever the device computes with) unless said otherwise; sums are accumulated
    in fp32. Outputs are written in place."""

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

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        """out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias. x, out [T, E]."""

    def add_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        """residual += x, then out = layer_norm(residual). All [T, E]."""

    def activate(self, kind: Activation, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = kind(x). Both [T, I]; out may be x."""

    def activate_mul(self, kind: Activation, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """out = kind(gate_up[:, :I]) * gate_up[:, I:]. gate_up [T, 2I]; out [T, I]."""

    def rope_write_kv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv: torch.Tensor,
        num_q_heads: int,
        norms: HeadNorms | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Norm and rotate queries and keys, and write keys and values into their slots.

        qkv           [T, (Hq + 2 Hkv) * D]  queries are changed in place; of keys and
                                             values nobody may rely on what is left
        cos, sin      [T, D] fp32            rotate-half convention, both halves filled
        slot_mapping  [T] int64              block_id * B + offset of each token; -1: it is
                                             written nowhere
        kv            [P, 2, B, Hkv, D]      with `scales` if it is quantized
        """

    def paged_decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        options: AttentionOptions = PLAIN,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Attend one query token per sequence over its paged KV, online softmax.

        q, out        [N, Hq, D]   may be strided over the first axis
        kv            [P, 2, B, Hkv, D], with `scales` if it is quantized
        block_tables  [N, M] int32 entries past a sequence's length are never read
        seq_lens      [N] int32    tokens including this one, at least 1
        Source: Kwon et al. 2023, arXiv:2309.06180, section 4.3; Milakov and
        Gimelshein 2018, arXiv:1805.02867, for the online softmax.
        """

    def paged_prefill(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        first_rows: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        options: AttentionOptions = PLAIN,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Attend the chunks of C sequences, each causally, over its cached prefix and itself.

        q, out        [T, Hq, D]   the chunks one after the other; may be strided over T
        kv            [P, 2, B, Hkv, D], the chunks' own keys and values included
        block_tables  [C, M] int32 entries past a sequence's length are never read
        first_rows    [C + 1] int32 of each chunk, from 0 on; the last entry is T
        seq_lens      [C] int32    tokens including the chunk: at least its own
        Works tile by tile over the tables; a sequence's KV is never gathered whole.
        """

    def copy_blocks(self, pool: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target), as if in order. pool [P, ...], dense blocks."""


__all__ = ["PLAIN", "Activation", "AttentionOptions", "HeadNorms", "Kernels"]
