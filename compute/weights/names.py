"""Our tensor names, their shapes, and how checkpoint formats call them.

Ours: embedding, norm, head, and per layer `layers.<n>.<part>`. A bias is `<part>.bias`.
"""

from __future__ import annotations

import re

from compute.config import ModelConfig

_HUGGING_FACE = {
    "model.embed_tokens.weight": "embedding",
    "model.norm.weight": "norm",
    "lm_head.weight": "head",
}
_HUGGING_FACE_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_GGUF = {"token_embd.weight": "embedding", "output_norm.weight": "norm", "output.weight": "head"}
_GGUF_LAYER = {
    "attn_norm": "attention_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
_LAYER_NAME = re.compile(r"(?:model\.layers|blk)\.(\d+)\.(.+)\.(weight|bias)")

# Frequencies that older exports store; ours come from the configuration.
_DERIVED = re.compile(r"(?:.*\.)?rotary_emb\.inv_freq|rope_freqs\.weight")


def is_derived(name: str) -> bool:
    """Whether a stored tensor follows from the configuration and is not read."""
    return _DERIVED.fullmatch(name) is not None


def from_hugging_face(name: str) -> str | None:
    """Our name of a tensor of a safetensors checkpoint; None if we know none."""
    return _translate(name, _HUGGING_FACE, _HUGGING_FACE_LAYER)


def from_gguf(name: str) -> str | None:
    """Our name of a tensor of a GGUF file of architecture llama; None if we know none."""
    return _translate(name, _GGUF, _GGUF_LAYER)


def _translate(name: str, whole: dict[str, str], parts: dict[str, str]) -> str | None:
    if name in whole:
        return whole[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in parts:
        return None
    suffix = ".bias" if match[3] == "bias" else ""
    return f"layers.{match[1]}.{parts[match[2]]}{suffix}"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the model needs, by our names."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        for part, shape in _layer_shapes(config).items():
            shapes[f"layers.{layer}.{part}"] = shape
    shapes["norm"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_q_heads * config.head_size
    kv_size = config.num_kv_heads * config.head_size
    attention = {"q": (q_size, hidden), "k": (kv_size, hidden), "v": (kv_size, hidden)}
    attention["o"] = (hidden, q_size)
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {"attention_norm": (hidden,), **attention}
    shapes |= {"mlp_norm": (hidden,), **mlp}
    if config.attention_bias:
        shapes |= {f"{part}.bias": (shape[0],) for part, shape in attention.items()}
    if config.mlp_bias:
        shapes |= {f"{part}.bias": (shape[0],) for part, shape in mlp.items()}
    return shapes
