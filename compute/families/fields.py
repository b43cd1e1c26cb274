"""Reads single fields of a Hugging Face configuration; each refusal names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from compute.config import LayerConfig
from compute.errors import ModelUnsupported
from compute.kernels import Activation

Raw = Mapping[str, Any]

_LARGEST = 2**31 - 1  # what the step contract can carry
_MOST_LAYERS = 4096  # far beyond any model; a list of 2^31 names would exhaust the memory
_HEAD_MULTIPLE = 8  # elements of a vector; kernels have no rest to handle
_Number = TypeVar("_Number", int, float)

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def positive(raw: Raw, key: str, kind: type[_Number], default: _Number | None = None) -> _Number:
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


def flag(raw: Raw, key: str, default: bool) -> bool:
    """Absent and null mean the default."""
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelUnsupported(f"{key}: {value!r} is neither true nor false")
    return value


def only(raw: Raw, key: str, allowed: Any) -> None:
    """Refuse an option that would change the arithmetic; absent and null are allowed."""
    value = raw.get(key)
    if value is not None and value != allowed:
        raise ModelUnsupported(f"{key} {value!r}: we run {allowed!r}")


def activation(raw: Raw, key: str, default: str) -> Activation:
    name = raw.get(key) or default
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelUnsupported(f"{key} {name!r}: we run {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def num_layers(raw: Raw, key: str = "num_hidden_layers") -> int:
    number = positive(raw, key, int)
    if number > _MOST_LAYERS:
        raise ModelUnsupported(f"{key} {number}: we run up to {_MOST_LAYERS}")
    return number


def heads(raw: Raw, hidden_size: int, key: str = "num_attention_heads") -> tuple[int, int, int]:
    """Numbers of query and KV heads, and the size of a head."""
    num_q_heads = positive(raw, key, int)
    num_kv_heads = positive(raw, "num_key_value_heads", int, num_q_heads)
    head_size = positive(raw, "head_dim", int, hidden_size // num_q_heads)
    if num_q_heads % num_kv_heads or head_size % _HEAD_MULTIPLE:
        raise ModelUnsupported(
            f"{key} {num_q_heads}, num_key_value_heads {num_kv_heads}, "
            f"head_dim {head_size}: heads must divide evenly and head_dim by {_HEAD_MULTIPLE}"
        )
    return num_q_heads, num_kv_heads, head_size


def window(raw: Raw) -> int:
    """sliding_window; 0 if there is none, or one that covers every sequence."""
    if raw.get("sliding_window") is None:
        return 0
    size = positive(raw, "sliding_window", int)
    return 0 if size >= positive(raw, "max_position_embeddings", int) else size


def layers(raw: Raw, is_windowed: list[bool], *, own_rope: bool = False) -> tuple[LayerConfig, ...]:
    """By layer_types if it is there, else by `is_windowed`; with `own_rope`, layers without
    a window use the second rope."""
    kinds = raw.get("layer_types")
    if kinds is not None:
        known = {"sliding_attention": True, "full_attention": False}
        if not isinstance(kinds, list) or len(kinds) != len(is_windowed):
            raise ModelUnsupported(f"layer_types: not a list of {len(is_windowed)}")
        for kind in kinds:
            if not isinstance(kind, str) or kind not in known:
                raise ModelUnsupported(f"layer_types: {kind!r}: we run {', '.join(known)}")
        is_windowed = [known[kind] for kind in kinds]
    size = window(raw) if any(is_windowed) else 0
    full = int(own_rope)
    return tuple(LayerConfig(size if has else 0, 0 if has else full) for has in is_windowed)
