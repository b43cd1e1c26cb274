"""The interface of compute.kernels on a GPU."""

from __future__ import annotations

import torch

from compute.kernels import PLAIN, Activation, AttentionOptions, HeadNorms
from compute.kernels.triton import (
    activations,
    copy_blocks,
    gather_blocks,
    int8_linear,
    norms,
    paged_decode,
    paged_prefill,
    rope_write_kv,
    sampling,
)
from compute.kernels.triton.tuning import Tuner


class TritonKernels:
    """Meets compute.kernels.Kernels; results equal the oracle's up to rounding.

    Runs on the current stream of the device that the tensors lie on. Copies no lengths
    from the device, so that steps can be captured in CUDA graphs, copy_blocks excepted;
    what is captured must have run once before, since it is compiled then.
    """

    def __init__(self, *, tunes: bool = False) -> None:
        """`tunes`: find the fastest configuration of attention and products by trial at
        the first call of a shape (see compute.kernels.triton.tuning)."""
        self._tuner = Tuner(tunes)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        norms.rms_norm(x, weight, eps, out)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        norms.add_rms_norm(x, residual, weight, eps, out)

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        norms.layer_norm(x, weight, bias, eps, out)

    def add_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        norms.add_layer_norm(x, residual, weight, bias, eps, out)

    def activate(self, kind: Activation, x: torch.Tensor, out: torch.Tensor) -> None:
        activations.activate(kind, x, out)

    def activate_mul(self, kind: Activation, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        activations.activate_mul(kind, gate_up, out)

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
        rope_write_kv.rope_write_kv(qkv, cos, sin, slot_mapping, kv, num_q_heads, norms, scales)

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
        paged_decode.paged_decode(
            q, kv, block_tables, seq_lens, scale, out, options, scales, self._tuner
        )

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
        paged_prefill.paged_prefill(
            q,
            kv,
            block_tables,
            first_rows,
            seq_lens,
            scale,
            out,
            options,
            scales,
            self._tuner,
        )

    def copy_blocks(self, pool: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        copy_blocks.copy_blocks(pool, pairs)

    def gather_blocks(
        self, pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor
    ) -> None:
        """staging[i] = pool[block_ids[i]]; see compute.kernels.triton.gather_blocks."""
        gather_blocks.gather_blocks(pool, block_ids, staging)

    def scatter_blocks(
        self, pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor
    ) -> None:
        """pool[block_ids[i]] = staging[i]."""
        gather_blocks.scatter_blocks(pool, block_ids, staging)

    def likeliest(self, logits: torch.Tensor) -> sampling.Drawn:
        """The likeliest token of each row [K, V]; see compute.kernels.triton.sampling."""
        return sampling.likeliest(logits)

    def draw(
        self, logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
    ) -> sampling.Drawn:
        """A token of each row [K, V] by inverse CDF."""
        return sampling.draw(logits, temperatures, uniforms)

    def int8_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """out = x @ (weight * scales).T + bias; see compute.kernels.triton.int8_linear."""
        int8_linear.int8_linear(x, weight, scales, bias, out, self._tuner)
