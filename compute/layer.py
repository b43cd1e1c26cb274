"""One layer of a decoder: its weights, and what it computes beside attention.

Axes: T tokens in the step, E hidden size, I intermediate size, and those of compute.kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from compute.config import ModelConfig
from compute.kernels import AttentionOptions, HeadNorms, Kernels
from compute.linear import Linear, Product
from compute.parallel import Alone, Group
from compute.rope import rotary_order
from compute.weights import Weights


@dataclass(frozen=True, slots=True)
class Parts:
    """What decoders are made with, beside kernels: products, and the ranks that share them.

    `quantization` says what products do to their weights: KV depends on it.
    """

    quantization: str = "none"
    linear: Callable[[torch.Tensor, torch.Tensor | None], Product] = Linear
    group: Group = field(default_factory=Alone)


class Norm:
    """RMSNorm or LayerNorm, as the model has it."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels, name: str) -> None:
        self._eps = config.norm_eps
        self._kernels = kernels
        self.weight = weights.take(name) + config.norm_offset
        self._bias = weights.take(f"{name}.bias") if config.norm == "layer" else None

    def after(self, update: torch.Tensor | None, residual: torch.Tensor, out: torch.Tensor) -> None:
        """residual += update, if there is one; out = norm(residual). All [T, E]."""
        kernels, eps, bias = self._kernels, self._eps, self._bias
        if bias is None and update is None:
            kernels.rms_norm(residual, self.weight, eps, out)
        elif bias is None:
            kernels.add_rms_norm(update, residual, self.weight, eps, out)
        elif update is None:
            kernels.layer_norm(residual, self.weight, bias, eps, out)
        else:
            kernels.add_layer_norm(update, residual, self.weight, bias, eps, out)


class Layer:
    """Weights of one layer; projections that share their input are one product."""

    def __init__(
        self, config: ModelConfig, weights: Weights, kernels: Kernels, parts: Parts, n: int
    ) -> None:
        """Take the tensors of layer `n`. Raises what Weights.take raises."""

        def norm(part: str) -> Norm:
            return Norm(config, weights, kernels, f"layers.{n}.{part}")

        def linear(*named: str, bias: bool) -> Product:
            names = [f"layers.{n}.{part}" for part in named]
            biases = [f"{name}.bias" for name in names]
            return parts.linear(
                weights.take_rows(names), weights.take_rows(biases) if bias else None
            )

        self._kernels = kernels
        self._group = parts.group
        self._activation = config.activation
        self._gated = config.gated
        self.attention_norm = norm("attention_norm")
        self.qkv = _qkv(config, weights, parts, f"layers.{n}.")
        self.head_norms = _head_norms(config, weights, f"layers.{n}.")
        self.options = AttentionOptions(config.layers[n].window, config.softcap)
        self._o = linear("o", bias=config.output_bias)
        self._post_attention = norm("post_attention_norm") if config.post_norms else None
        self.mlp_norm = norm("mlp_norm")
        widening = ("gate", "up") if config.gated else ("up",)
        self._widen = linear(*widening, bias=config.mlp_bias)
        self._down = linear("down", bias=config.mlp_bias)
        self._post_mlp = norm("post_mlp_norm") if config.post_norms else None

    def attended(self, heads: torch.Tensor) -> torch.Tensor:
        """What attention adds to the residual: [T, Hq * D] -> [T, E]."""
        return self._update(self._o(heads), self._post_attention)

    def mlp(self, normed: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        """What the MLP adds to the residual: [T, E] -> [T, E]; `inner` [T, I] is scratch."""
        widened = self._widen(normed)
        if self._gated:
            self._kernels.activate_mul(self._activation, widened, inner)
        else:
            self._kernels.activate(self._activation, widened, inner)
        return self._update(self._down(inner), self._post_mlp)

    def _update(self, update: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """The sum of all ranks' parts, normed."""
        self._group.add_up(update)
        if norm is None:
            return update
        out = torch.empty_like(update)
        norm.after(None, update, out)
        return out


def _qkv(config: ModelConfig, weights: Weights, parts: Parts, layer: str) -> Product:
    """Rows in the order of Kernels.rope_write_kv."""

    def rows(suffix: str) -> torch.Tensor:
        q, k, v = (weights.take(f"{layer}{part}{suffix}") for part in ("q", "k", "v"))
        return torch.cat([_in_rotary_order(config, q), _in_rotary_order(config, k), v])

    return parts.linear(rows(""), rows(".bias") if config.qkv_bias else None)


def _head_norms(config: ModelConfig, weights: Weights, layer: str) -> HeadNorms | None:
    if not config.head_norms:
        return None
    q, k = (weights.take(f"{layer}{part}") + config.norm_offset for part in ("q_norm", "k_norm"))
    return HeadNorms(_in_rotary_order(config, q), _in_rotary_order(config, k), config.norm_eps)


def _in_rotary_order(config: ModelConfig, rows: torch.Tensor) -> torch.Tensor:
    """Rows [H * D, ...] of heads, those that turn with each other D/2 apart. Scores do not
    depend on the order, as long as queries and keys have the same."""
    size = config.head_size
    if config.num_rotated in (0, size):
        return rows
    order = rotary_order(config.num_rotated, size)
    return rows.view(-1, size, *rows.shape[1:])[:, order].reshape(rows.shape)
