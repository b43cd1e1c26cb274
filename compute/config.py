"""What a model is: the numbers of its Hugging Face configuration that we compute with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from compute.errors import ModelUnsupported
from compute.rope import RopeConfig
from compute.types import KvShape

_FAMILIES = ("llama", "mistral")
_LARGEST = 2**31 - 1  # what the step contract can carry
_MOST_LAYERS = 4096  # far beyond any model; a list of 2^31 names would exhaust the memory
_HEAD_MULTIPLE = 8  # elements of a vector; kernels have no rest to handle
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    `max_sequence_length` is the longest sequence whose positions are computed exactly
    as the model defines them (see compute.rope).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    max_sequence_length: int
    rope: RopeConfig

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json of the Llama family, in the spelling of transformers 4 or 5.

        Raises:
            ModelUnsupported: another family, an option we cannot run, or a field that is
                missing or of the wrong kind; the message names it.
        """
        _check_family(raw)
        _check_window(raw)
        hidden_size = _positive(raw, "hidden_size", int)
        num_q_heads = _positive(raw, "num_attention_heads", int)
        num_kv_heads = _positive(raw, "num_key_value_heads", int, num_q_heads)
        max_positions = _positive(raw, "max_position_embeddings", int)
        head_size = _positive(raw, "head_dim", int, hidden_size // num_q_heads)
        if num_q_heads % num_kv_heads or head_size % _HEAD_MULTIPLE:
            raise ModelUnsupported(
                f"num_attention_heads {num_q_heads}, num_key_value_heads {num_kv_heads}, "
                f"head_dim {head_size}: heads must divide evenly and head_dim by {_HEAD_MULTIPLE}"
            )
        num_layers = _positive(raw, "num_hidden_layers", int)
        if num_layers > _MOST_LAYERS:
            raise ModelUnsupported(f"num_hidden_layers {num_layers}: we run up to {_MOST_LAYERS}")
        rope = RopeConfig.from_dict(raw, head_size, max_positions)
        return cls(
            vocab_size=_positive(raw, "vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=_positive(raw, "intermediate_size", int),
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            rms_norm_eps=_positive(raw, "rms_norm_eps", float, 1e-6),
            attention_bias=bool(raw.get("attention_bias")),
            mlp_bias=bool(raw.get("mlp_bias")),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
            max_sequence_length=rope.max_exact_length,
            rope=rope,
        )

    def kv_shape(self, dtype: str) -> KvShape:
        """The KV of one token of this model, kept in `dtype`."""
        return KvShape(self.num_layers, self.num_kv_heads, self.head_size, dtype)


def _check_family(raw: Mapping[str, Any]) -> None:
    family = raw.get("model_type")
    if family not in _FAMILIES:
        raise ModelUnsupported(f"model_type {family!r}: we run {', '.join(_FAMILIES)}")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelUnsupported(f"hidden_act {activation!r}: we run silu")
    if raw.get("quantization_config"):
        raise ModelUnsupported("quantization_config: quantized checkpoints are not supported")


def _check_window(raw: Mapping[str, Any]) -> None:
    if raw.get("sliding_window") is None:
        return
    window = _positive(raw, "sliding_window", int)
    if window < _positive(raw, "max_position_embeddings", int):
        raise ModelUnsupported(f"sliding_window {window}: we attend to the whole sequence")


def _positive(
    raw: Mapping[str, Any], key: str, kind: type[_Number], default: _Number | None = None
) -> _Number:
    """A number above 0, 31 bits at most. Absent and null mean the default, as in
    transformers."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelUnsupported(f"the configuration has no {key}")
    kinds = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value <= _LARGEST:
        raise ModelUnsupported(f"{key}: {value!r} is not a positive 31-bit {kind.__name__}")
    return kind(value)
