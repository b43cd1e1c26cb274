"""Llama 1 to 3 and SmolLM, Mistral, Qwen2, Qwen3, Phi-3: RMSNorm, RoPE, SwiGLU.

Sources: Touvron et al. 2023, arXiv:2302.13971; Jiang et al. 2023, arXiv:2310.06825; Qwen
Team 2024, arXiv:2407.10671, and 2025, arXiv:2505.09388; Abdin et al. 2024, arXiv:2404.14219.
"""

from __future__ import annotations

from typing import Any

from compute.config import ModelConfig
from compute.errors import ModelUnsupported
from compute.families import fields
from compute.families.fields import Raw
from compute.rope import RopeConfig


def llama(raw: Raw) -> ModelConfig:
    if fields.window(raw):
        raise ModelUnsupported(
            f"sliding_window {raw['sliding_window']}: llama attends to the whole sequence"
        )
    has_bias = fields.flag(raw, "attention_bias", False)
    return _config(
        raw,
        windowed=False,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.flag(raw, "mlp_bias", False),
    )


def mistral(raw: Raw) -> ModelConfig:
    return _config(raw, windowed=True)


def qwen2(raw: Raw) -> ModelConfig:
    return _config(_with_qwen_windows(raw), windowed=True, qkv_bias=True)


def qwen3(raw: Raw) -> ModelConfig:
    has_bias = fields.flag(raw, "attention_bias", False)
    return _config(
        _with_qwen_windows({"head_dim": 128, **raw}),
        windowed=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
        head_norms=True,
    )


def phi3(raw: Raw) -> ModelConfig:
    return _config(raw, windowed=True, default_eps=1e-5, partial=True)


def _with_qwen_windows(raw: Raw) -> Raw:
    """Their windows are off unless asked for, and begin at layer max_window_layers."""
    if not fields.flag(raw, "use_sliding_window", False):
        return {**raw, "sliding_window": None}
    if raw.get("layer_types") is not None:
        return raw
    first, count = raw.get("max_window_layers", 28), fields.num_layers(raw)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ModelUnsupported(f"max_window_layers: {first!r} is not a number of layers")
    kinds = ["full_attention" if n < first else "sliding_attention" for n in range(count)]
    return {**raw, "layer_types": kinds}


def _config(
    raw: Raw,
    *,
    windowed: bool,
    default_eps: float = 1e-6,
    partial: bool = False,
    **options: Any,
) -> ModelConfig:
    hidden_size = fields.positive(raw, "hidden_size", int)
    num_q_heads, num_kv_heads, head_size = fields.heads(raw, hidden_size)
    max_positions = fields.positive(raw, "max_position_embeddings", int)
    rope = RopeConfig.from_dict(raw, head_size, max_positions, partial=partial)
    activation = fields.activation(raw, "hidden_act", "silu")
    if activation != "silu":
        raise ModelUnsupported(f"hidden_act {raw['hidden_act']!r}: this family runs silu")
    return ModelConfig(
        family=str(raw["model_type"]),
        vocab_size=fields.positive(raw, "vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=fields.positive(raw, "intermediate_size", int),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        layers=fields.layers(raw, [windowed] * fields.num_layers(raw)),
        ropes=(rope,),
        max_sequence_length=rope.max_exact_length,
        norm_eps=fields.positive(raw, "rms_norm_eps", float, default_eps),
        tie_word_embeddings=fields.flag(raw, "tie_word_embeddings", False),
        **options,
    )
