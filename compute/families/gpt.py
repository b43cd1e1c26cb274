"""GPT-2, OPT and GPT-NeoX: LayerNorm with biases, an MLP without gate.

Sources: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; Zhang
et al. 2022, arXiv:2205.01068 (OPT); Black et al. 2022, arXiv:2204.06745 (GPT-NeoX).
"""

from __future__ import annotations

from compute.config import ModelConfig
from compute.families import fields
from compute.families.fields import Raw
from compute.rope import RopeConfig


def gpt2(raw: Raw) -> ModelConfig:
    hidden_size = fields.positive(raw, "n_embd", int)
    num_q_heads, num_kv_heads, head_size = _heads(raw, hidden_size, "n_head")
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        fields.only(raw, key, False)
    return ModelConfig(
        family="gpt2",
        vocab_size=fields.positive(raw, "vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=fields.positive(raw, "n_inner", int, 4 * hidden_size),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        layers=fields.layers({}, [False] * fields.num_layers(raw, "n_layer")),
        ropes=(),
        max_sequence_length=fields.positive(raw, "n_positions", int, 1024),
        norm="layer",
        norm_eps=fields.positive(raw, "layer_norm_epsilon", float, 1e-5),
        activation=fields.activation(raw, "activation_function", "gelu_new"),
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        attention_scale=0.0 if fields.flag(raw, "scale_attn_weights", True) else 1.0,
        tie_word_embeddings=fields.flag(raw, "tie_word_embeddings", True),
    )


def opt(raw: Raw) -> ModelConfig:
    hidden_size = fields.positive(raw, "hidden_size", int)
    num_q_heads, num_kv_heads, head_size = _heads(raw, hidden_size)
    fields.only(raw, "do_layer_norm_before", True)
    fields.only(raw, "layer_norm_elementwise_affine", True)
    fields.only(raw, "_remove_final_layer_norm", False)
    fields.only(raw, "word_embed_proj_dim", hidden_size)
    has_bias = fields.flag(raw, "enable_bias", True)
    return ModelConfig(
        family="opt",
        vocab_size=fields.positive(raw, "vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=fields.positive(raw, "ffn_dim", int),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        layers=fields.layers({}, [False] * fields.num_layers(raw)),
        ropes=(),
        position_offset=2,
        max_sequence_length=fields.positive(raw, "max_position_embeddings", int),
        norm="layer",
        norm_eps=1e-5,  # torch's default, which the configuration cannot change
        activation=fields.activation(raw, "activation_function", "relu"),
        gated=False,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
        tie_word_embeddings=fields.flag(raw, "tie_word_embeddings", True),
    )


def gpt_neox(raw: Raw) -> ModelConfig:
    hidden_size = fields.positive(raw, "hidden_size", int)
    num_q_heads, num_kv_heads, head_size = _heads(raw, hidden_size)
    max_positions = fields.positive(raw, "max_position_embeddings", int)
    # Their names before transformers 5, and the share that was meant without one.
    old = {
        "rope_theta": raw.get("rotary_emb_base"),
        "partial_rotary_factor": raw.get("rotary_pct", 0.25),
    }
    rope = RopeConfig.from_dict({**old, **raw}, head_size, max_positions, partial=True)
    has_bias = fields.flag(raw, "attention_bias", True)
    return ModelConfig(
        family="gpt_neox",
        vocab_size=fields.positive(raw, "vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=fields.positive(raw, "intermediate_size", int),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        layers=fields.layers({}, [False] * fields.num_layers(raw)),
        ropes=(rope,),
        max_sequence_length=rope.max_exact_length,
        norm="layer",
        norm_eps=fields.positive(raw, "layer_norm_eps", float, 1e-5),
        activation=fields.activation(raw, "hidden_act", "gelu"),
        gated=False,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=True,
        parallel=fields.flag(raw, "use_parallel_residual", True),
        tie_word_embeddings=fields.flag(raw, "tie_word_embeddings", False),
    )


def _heads(raw: Raw, hidden_size: int, key: str = "num_attention_heads") -> tuple[int, int, int]:
    """These families have a KV head for each query head, and heads as wide as hidden."""
    return fields.heads({key: raw.get(key)}, hidden_size, key)
