"""The decoder: Llama-family arithmetic whose only KV is the page pool.

Axes: T tokens in the step, N sequences that decode, K rows that are wanted, E hidden size,
V vocabulary, and those of compute.kernels.

Source: Touvron et al. 2023, arXiv:2302.13971 (the architecture); Kwon et al. 2023,
arXiv:2309.06180 (KV in pages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from compute.config import ModelConfig
from compute.kernels import Kernels
from compute.linear import Linear
from compute.rope import RopeTables
from compute.weights import Weights


class Places(NamedTuple):
    """Where sequences have their KV.

    block_tables  [N, M] int32   entries past a sequence's length are never read
    seq_lens      [N] int32      tokens including those of this step
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step: one row for each sequence that decodes, then the chunks.

    token_ids, positions  [T] int64
    slot_mapping          [T] int64   block_id * B + offset, no slot twice
    decodes               of the N rows that come first
    chunks                of the C chunks behind them
    first_rows            [C + 1] int32   of the chunks, counted behind the decodes
    output_rows           [K] int64   rows that `forward` returns, ascending, none twice
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    decodes: Places
    chunks: Places
    first_rows: torch.Tensor
    output_rows: torch.Tensor


class LlamaDecoder:
    """Weights and the forward pass. Stateless but for scratch memory; one thread at a time."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        """Take every tensor from `weights`, once; a layer at a time, so that the peak of
        memory is the model and one layer.

        Raises what Weights.take raises.
        """
        self.config = config
        self._kernels = kernels
        embedding = weights.take("embedding")
        self._layers = [_Layer(config, weights, n) for n in range(config.num_layers)]
        self._norm = weights.take("norm")
        tied = config.tie_word_embeddings
        # A tied embedding is looked up in the head's weights: the table is kept once.
        self._head = Linear(embedding if tied else weights.take("head"), None)
        self._embedding = None if tied else embedding
        self._rope = RopeTables(config.rope)
        self._scale = config.head_size**-0.5
        self._scratch = _Scratch(config, self.dtype, num_rows=1)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV."""
        return self._norm.dtype

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_layers: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run the step: write its keys and values, return the wanted rows [K, E], normed.

        `kv_layers` are the L layers of the pool, each [P, 2, B, Hkv, D].
        """
        num_rows = batch.token_ids.shape[0]
        buffers = self._buffers(num_rows)
        residual, normed = buffers.residual, buffers.normed
        self._embed(batch.token_ids, residual)
        cos, sin = self._rope.rows(batch.positions)
        eps, kernels = self.config.rms_norm_eps, self._kernels
        kernels.rms_norm(residual, self._layers[0].attention_norm, eps, normed)
        update = normed
        for n, layer in enumerate(self._layers):
            if n:
                kernels.add_rms_norm(update, residual, layer.attention_norm, eps, normed)
            attended = self._attend(layer, batch, kv_layers[n], cos, sin)
            kernels.add_rms_norm(layer.o(attended), residual, layer.mlp_norm, eps, normed)
            kernels.activate_mul("silu", layer.gate_up(normed), buffers.inner)
            update = layer.down(buffers.inner)
        return self._outputs(update, residual, batch.output_rows)

    def _embed(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        if self._embedding is None:
            out.copy_(self._head.weight_rows(token_ids))
        else:
            torch.index_select(self._embedding, 0, token_ids, out=out)

    def _attend(
        self,
        layer: _Layer,
        batch: Batch,
        kv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """Write the step's keys and values, then attend. Returns [T, Hq * D]."""
        config, kernels, buffers = self.config, self._kernels, self._scratch
        qkv = layer.qkv(buffers.normed)
        kernels.rope_write_kv(qkv, cos, sin, batch.slot_mapping, kv, config.num_q_heads)
        q = qkv.view(qkv.shape[0], -1, config.head_size)[:, : config.num_q_heads]
        out = buffers.attended
        n = batch.decodes.seq_lens.shape[0]
        if n:
            kernels.paged_decode(q[:n], kv, *batch.decodes, self._scale, out[:n])
        if n < q.shape[0]:
            tables, lengths = batch.chunks
            kernels.paged_prefill(
                q[n:], kv, tables, batch.first_rows, lengths, self._scale, out[n:]
            )
        return out.view(out.shape[0], -1)

    def _outputs(
        self, update: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        if rows.shape[0] == 0:
            return torch.empty(0, self.config.hidden_size, dtype=self.dtype)
        if rows.shape[0] != residual.shape[0]:
            update, residual = update[rows], residual[rows]
        normed = torch.empty_like(residual)
        self._kernels.add_rms_norm(update, residual, self._norm, self.config.rms_norm_eps, normed)
        return normed

    @torch.inference_mode()
    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[K, E] rows of `forward` -> [K, V] fp32; a row does not depend on the others."""
        # In bf16, logits around 25 would be 1/8 apart: the likeliest tokens would often tie.
        return self._head.fp32(outputs)

    def _buffers(self, num_rows: int) -> _Scratch:
        """Scratch of exactly num_rows; steady decoding finds the last step's again."""
        if self._scratch.residual.shape[0] != num_rows:
            self._scratch = _Scratch(self.config, self.dtype, num_rows)
        return self._scratch


class _Layer:
    """Weights of one layer; projections that share their input are one product."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        def linear(*parts: str, bias: bool) -> Linear:
            names = [f"layers.{index}.{part}" for part in parts]
            biases = [f"{name}.bias" for name in names]
            return Linear(weights.take_rows(names), weights.take_rows(biases) if bias else None)

        self.attention_norm = weights.take(f"layers.{index}.attention_norm")
        self.qkv = linear("q", "k", "v", bias=config.attention_bias)
        self.o = linear("o", bias=config.attention_bias)
        self.mlp_norm = weights.take(f"layers.{index}.mlp_norm")
        self.gate_up = linear("gate", "up", bias=config.mlp_bias)
        self.down = linear("down", bias=config.mlp_bias)


class _Scratch:
    """Activations that every layer overwrites.

    residual, normed [T, E]; inner [T, I]; attended [T, Hq, D]
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, num_rows: int) -> None:
        self.residual = torch.empty(num_rows, config.hidden_size, dtype=dtype)
        self.normed = torch.empty_like(self.residual)
        self.inner = torch.empty(num_rows, config.intermediate_size, dtype=dtype)
        self.attended = torch.empty(num_rows, config.num_q_heads, config.head_size, dtype=dtype)
