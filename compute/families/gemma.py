"""Gemma 2 and 3: norms behind attention and MLP, windows in most layers, a scaled embedding.

Sources: Gemma Team 2024, arXiv:2408.00118, and 2025, arXiv:2503.19786.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compute.config import ModelConfig
from compute.errors import ModelUnsupported
from compute.families import fields
from compute.families.fields import Raw
from compute.rope import RopeConfig


def gemma2(raw: Raw) -> ModelConfig:
    is_windowed = [n % 2 == 0 for n in range(fields.num_layers(raw))]
    raw = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, **raw}
    return _config(raw, is_windowed, [raw])


def gemma3(raw: Raw) -> ModelConfig:
    every = fields.positive(raw, "sliding_window_pattern", int, 6)
    is_windowed = [(n + 1) % every != 0 for n in range(fields.num_layers(raw))]
    return _config(raw, is_windowed, _gemma3_ropes(raw), head_norms=True, own_rope=True)


def _gemma3_ropes(raw: Raw) -> list[Raw]:
    """Of layers with a window, and of those without, which alone are scaled."""
    given = raw.get("rope_parameters")
    if isinstance(given, Mapping) and "full_attention" in given:
        return [
            {"rope_parameters": given[kind]} for kind in ("sliding_attention", "full_attention")
        ]
    return [
        {"rope_theta": raw.get("rope_local_base_freq", 1e4)},
        {"rope_theta": raw.get("rope_theta", 1e6), "rope_scaling": raw.get("rope_scaling")},
    ]


def _config(
    raw: Raw, is_windowed: list[bool], ropes: list[Raw], *, own_rope: bool = False, **options: Any
) -> ModelConfig:
    hidden_size = fields.positive(raw, "hidden_size", int)
    num_q_heads, num_kv_heads, head_size = fields.heads({"head_dim": 256, **raw}, hidden_size)
    max_positions = fields.positive(raw, "max_position_embeddings", int)
    fields.only(raw, "use_bidirectional_attention", False)
    read = tuple(RopeConfig.from_dict(each, head_size, max_positions) for each in ropes)
    has_bias = fields.flag(raw, "attention_bias", False)
    scalar = fields.positive(raw, "query_pre_attn_scalar", float, 256.0)
    if raw.get("sliding_window") is None and any(is_windowed):
        raise ModelUnsupported("the configuration has no sliding_window")
    return ModelConfig(
        family=str(raw["model_type"]),
        vocab_size=fields.positive(raw, "vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=fields.positive(raw, "intermediate_size", int),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        layers=fields.layers(raw, is_windowed, own_rope=own_rope),
        ropes=read,
        max_sequence_length=min(rope.max_exact_length for rope in read),
        norm_eps=fields.positive(raw, "rms_norm_eps", float, 1e-6),
        norm_offset=1.0,
        activation=fields.activation(raw, "hidden_activation", "gelu_pytorch_tanh"),
        qkv_bias=has_bias,
        output_bias=has_bias,
        post_norms=True,
        attention_scale=scalar**-0.5,
        embedding_scale=hidden_size**0.5,
        softcap=_cap(raw, "attn_logit_softcapping"),
        final_softcap=_cap(raw, "final_logit_softcapping"),
        tie_word_embeddings=fields.flag(raw, "tie_word_embeddings", True),
        **options,
    )


def _cap(raw: Raw, key: str) -> float:
    """0 for none."""
    return 0.0 if raw.get(key) is None else fields.positive(raw, key, float)
