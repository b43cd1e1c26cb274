"""Tiny random models of every family, in transformers and in our decoder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from compute.config import ModelConfig
from compute.families import config_from
from compute.kernels import Kernels
from compute.layer import Parts
from compute.model import Decoder
from compute.weights import Weights, open_source

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Larger than the usual 0.02, so that attention is far from uniform in so small a model.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA = {**_SIZES, "head_dim": 16}
_GPT2 = {
    "vocab_size": 97,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
_OPT = {
    "vocab_size": 97,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "init_std": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
_NEOX = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GEMMA = {**_LLAMA, "sliding_window": 24, "query_pre_attn_scalar": 20}
_PHI3 = {**_SIZES, "hidden_size": 64, "original_max_position_embeddings": 256}


def _rope(kind: str = "default", **parameters) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **parameters}}


# name: (family, configuration)
VARIANTS = {
    "llama": ("Llama", {**_LLAMA, "vocab_size": 98}),
    "mistral": ("Mistral", {**_LLAMA, "sliding_window": 24}),
    "mistral, no window": ("Mistral", {**_LLAMA, "sliding_window": None}),
    "qwen2": ("Qwen2", {**_SIZES, "hidden_size": 64, "tie_word_embeddings": True}),
    "qwen2, windows": (
        "Qwen2",
        {
            **_SIZES,
            "hidden_size": 64,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", _LLAMA),
    "qwen3, biases": ("Qwen3", {**_LLAMA, "attention_bias": True, "tie_word_embeddings": True}),
    "phi3": ("Phi3", _PHI3),
    "phi3, window and partial": (
        "Phi3",
        {**_PHI3, "sliding_window": 40, **_rope(partial_rotary_factor=0.75)},
    ),
    "phi3, longrope": (
        "Phi3",
        {
            **_PHI3,
            **_rope(
                "longrope",
                short_factor=[1.0 + n / 8 for n in range(8)],
                long_factor=[4.0 + n for n in range(8)],
                original_max_position_embeddings=128,
                partial_rotary_factor=1.0,
            ),
            "original_max_position_embeddings": 128,
        },
    ),
    "gpt2": ("GPT2", _GPT2),
    "gpt2, wide": ("GPT2", {**_GPT2, "n_inner": 72, "activation_function": "gelu"}),
    "gpt2, untied": ("GPT2", {**_GPT2, "tie_word_embeddings": False, "scale_attn_weights": False}),
    "opt": ("OPT", _OPT),
    "opt, no biases": ("OPT", {**_OPT, "enable_bias": False, "activation_function": "gelu"}),
    "gpt_neox": ("GPTNeoX", {**_NEOX, **_rope(partial_rotary_factor=0.25)}),
    "gpt_neox, whole heads in sequence": (
        "GPTNeoX",
        {**_NEOX, **_rope(partial_rotary_factor=1.0), "use_parallel_residual": False},
    ),
    "gpt_neox, no attention bias": (
        "GPTNeoX",
        {**_NEOX, **_rope(partial_rotary_factor=0.5), "attention_bias": False},
    ),
    "gemma2": ("Gemma2", _GEMMA),
    "gemma2, untied": ("Gemma2", {**_GEMMA, "tie_word_embeddings": False, "attention_bias": True}),
    "gemma3": ("Gemma3", {**_GEMMA, "num_hidden_layers": 7}),
    "gemma3, scaled": (
        "Gemma3",
        {
            **_GEMMA,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
}


@dataclass
class FamilyModel:
    oracle: transformers.PreTrainedModel
    config: ModelConfig
    decoder: Decoder
    directory: Path

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """transformers' logits [T, V]."""
        with torch.inference_mode():
            return self.oracle(torch.tensor([token_ids])).logits[0].float()


def oracle_of(variant: str) -> transformers.PreTrainedModel:
    """Random weights everywhere: biases and norms too, which transformers starts at 0 and 1,
    where an error would not show."""
    family, settings = VARIANTS[variant]
    torch.manual_seed(7)
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**settings)
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    # Eager: the other implementations leave out Gemma 2's cap on scores.
    oracle = getattr(transformers, f"{family}{head}")._from_config(
        config, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if parameter.dim() == 1:
                mean = 0.0 if name.endswith("bias") or family.startswith("Gemma") else 1.0
                parameter.normal_(mean=mean, std=0.3)
    return oracle.eval()


def make(
    variant: str, kernels: Kernels, directory: Path, dtype=torch.float32, parts: Parts | None = None
) -> FamilyModel:
    oracle = oracle_of(variant).to(dtype)
    oracle.save_pretrained(directory)
    config = config_from(oracle.config.to_dict())
    weights = Weights(open_source(directory, config), dtype)
    return FamilyModel(oracle, config, Decoder(config, weights, kernels, parts), directory)
