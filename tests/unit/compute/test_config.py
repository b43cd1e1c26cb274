"""Reading a Hugging Face configuration."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, MistralConfig

from compute.errors import ModelUnsupported
from compute.families import config_from
from compute.types import KvShape

MINIMAL = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def test_absent_fields_have_the_defaults_of_transformers():
    ours = config_from(MINIMAL)
    fields = {key: value for key, value in MINIMAL.items() if key != "model_type"}
    oracle = LlamaConfig(**fields)
    assert ours == config_from(oracle.to_dict())
    assert ours.num_kv_heads == oracle.num_key_value_heads == 4
    assert ours.head_size == oracle.head_dim == 16
    assert ours.norm_eps == oracle.rms_norm_eps
    assert ours.tie_word_embeddings == oracle.tie_word_embeddings
    assert ours.ropes[0].theta == oracle.rope_parameters["rope_theta"]


def test_kv_shape_is_that_of_one_token():
    config = config_from({**MINIMAL, "num_key_value_heads": 2, "head_dim": 32})
    assert config.kv_shape("bfloat16") == KvShape(2, 2, 32, "bfloat16")


def test_a_window_that_covers_every_sequence_is_none():
    raw = MistralConfig(sliding_window=None).to_dict()
    none = config_from(raw)
    assert none.num_kv_heads == 8
    assert {layer.window for layer in none.layers} == {0}
    wide = {**raw, "sliding_window": raw["max_position_embeddings"]}
    assert config_from(wide) == none
    narrow = config_from({**raw, "sliding_window": 4096})
    assert {layer.window for layer in narrow.layers} == {4096}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": None}, "model_type"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"head_dim": 100}, "head_dim 100"),  # kernels work on vectors of 8
        ({"num_attention_heads": 128}, "head_dim"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings"),
        ({"sliding_window": "wide"}, "sliding_window"),
        ({"sliding_window": 128}, "sliding_window 128: llama"),
        ({"sliding_window": 8, "max_position_embeddings": None}, "max_position_embeddings"),
    ],
)
def test_what_cannot_run_is_refused_by_name(change, named):
    with pytest.raises(ModelUnsupported, match=named):
        config_from({**MINIMAL, **change})
