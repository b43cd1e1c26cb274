"""The decoder: the arithmetic of all families, whose only KV is the page pool.

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
from compute.layer import Layer, Norm, Parts
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


class Decoder:
    """Weights and the forward pass. Stateless but for scratch memory; one thread at a time."""

    def __init__(
        self, config: ModelConfig, weights: Weights, kernels: Kernels, parts: Parts | None = None
    ) -> None:
        """Take every tensor from `weights`, once; a layer at a time, so that the peak of
        memory is the model and one layer.

        `config` is of this rank's share; `parts` is the CPU's alone unless given.

        Raises what Weights.take raises.
        """
        self._parts = parts = parts or Parts()
        self.config = config
        self._kernels = kernels
        embedding = weights.take("embedding")
        self._positions = None if config.ropes else weights.take("positions")
        self._layers = [Layer(config, weights, kernels, parts, n) for n in range(config.num_layers)]
        self._norm = Norm(config, weights, kernels, "norm")
        tied = config.tie_word_embeddings
        # A tied embedding is looked up in the head's weights: the table is kept once.
        self._head = parts.linear(embedding if tied else weights.take("head"), None)
        self._embedding = None if tied else embedding
        self._ropes = [RopeTables(rope, config.head_size) for rope in config.ropes]
        self._scratch = _Scratch(config, self.dtype, num_rows=1)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV."""
        return self._norm.weight.dtype

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_layers: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run the step: write its keys and values, return the wanted rows [K, E], normed.

        `kv_layers` are the L layers of the pool, each [P, 2, B, Hkv, D].
        """
        buffers = self._buffers(batch.token_ids.shape[0])
        residual, normed = buffers.residual, buffers.normed
        self._embed(batch, residual)
        turns = self._turns(batch.positions)
        update: torch.Tensor | None = None
        for layer, settings, kv in zip(
            self._layers, self.config.layers, kv_layers[: len(self._layers)], strict=True
        ):
            layer.attention_norm.after(update, residual, normed)
            update = layer.attended(self._attend(layer, batch, kv, turns[settings.rope]))
            if self.config.parallel:
                layer.mlp_norm.after(None, residual, normed)
                update += layer.mlp(normed, buffers.inner)
            else:
                layer.mlp_norm.after(update, residual, normed)
                update = layer.mlp(normed, buffers.inner)
        assert update is not None  # a model has a layer
        return self._outputs(update, residual, batch.output_rows)

    def _embed(self, batch: Batch, out: torch.Tensor) -> None:
        if self._embedding is None:
            out.copy_(self._head.weight_rows(batch.token_ids))
        else:
            torch.index_select(self._embedding, 0, batch.token_ids, out=out)
        if self._positions is not None:
            out += self._positions[batch.positions + self.config.position_offset]
        if self.config.embedding_scale != 1.0:
            # As in transformers, whose factor is rounded to the type of the weights.
            out *= torch.tensor(self.config.embedding_scale, dtype=out.dtype)

    def _turns(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """cos and sin [T, D] of each of the model's ropes; without any, of no turn."""
        if not self._ropes:
            shape = (positions.shape[0], self.config.head_size)
            return [(torch.ones(1).expand(*shape).contiguous(), torch.zeros(shape))]
        return [rope.rows(positions) for rope in self._ropes]

    def _attend(
        self,
        layer: Layer,
        batch: Batch,
        kv: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Write the step's keys and values, then attend. Returns [T, Hq * D]."""
        config, kernels, out = self.config, self._kernels, self._scratch.attended
        qkv = layer.qkv(self._scratch.normed)
        heads = config.num_q_heads
        kernels.rope_write_kv(qkv, *turn, batch.slot_mapping, kv, heads, layer.head_norms)
        q = qkv.view(qkv.shape[0], -1, config.head_size)[:, :heads]
        n, scale, options = batch.decodes.seq_lens.shape[0], config.scale, layer.options
        if n:
            kernels.paged_decode(q[:n], kv, *batch.decodes, scale, out[:n], options)
        if n < q.shape[0]:
            tables, lengths = batch.chunks
            kernels.paged_prefill(
                q[n:], kv, tables, batch.first_rows, lengths, scale, out[n:], options
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
        self._norm.after(update, residual, normed)
        return normed

    @torch.inference_mode()
    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[K, E] rows of `forward` -> [K, V] fp32; a row does not depend on the others."""
        # In bf16, logits around 25 would be 1/8 apart: the likeliest tokens would often tie.
        logits = self._head.fp32(outputs)
        if logits.shape[1] < self.config.vocab_size:
            logits = self._parts.group.side_by_side(logits)
        cap = self.config.final_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _buffers(self, num_rows: int) -> _Scratch:
        """Scratch of exactly num_rows; steady decoding finds the last step's again."""
        if self._scratch.residual.shape[0] != num_rows:
            self._scratch = _Scratch(self.config, self.dtype, num_rows)
        return self._scratch


class _Scratch:
    """Activations that every layer overwrites.

    residual, normed [T, E]; inner [T, I]; attended [T, Hq, D]
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, num_rows: int) -> None:
        self.residual = torch.empty(num_rows, config.hidden_size, dtype=dtype)
        self.normed = torch.empty_like(self.residual)
        self.inner = torch.empty(num_rows, config.intermediate_size, dtype=dtype)
        self.attended = torch.empty(num_rows, config.num_q_heads, config.head_size, dtype=dtype)
