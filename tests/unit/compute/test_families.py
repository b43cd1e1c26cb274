"""Every family computes what transformers computes, in chunks and token by token."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from compute.batching import pack
from compute.errors import ModelUnsupported
from compute.families import FAMILIES, config_from
from compute.kernels.cpu import CpuKernels
from compute.kernels.reference import ReferenceKernels
from compute.layer import Parts
from compute.linear import Int8Linear, quantized
from compute.sampling import SequenceSampler
from compute.sequences import KnownSequence, PlannedChunk
from compute.types import SamplingOptions
from tests.unit.compute import families

TOLERANCE = 1e-4  # fp32: sums over other orders than the oracle's
NUM_TOKENS = 100
BLOCK_SIZE = 16


def _layers(config):
    """A pool that is all NaN: whatever is read without having been written shows."""
    shape = (16, 2, BLOCK_SIZE, config.num_kv_heads, config.head_size)
    return [torch.full(shape, math.nan) for _ in range(config.num_layers)]


def _logits(model, layers, token_ids, sizes) -> torch.Tensor:
    """Logits [T, V] of every position; all chunks of a size are steps of their own."""
    table = np.array(random.Random(1).sample(range(16), -(-len(token_ids) // BLOCK_SIZE)), np.int32)
    # One token of the prompt is still to come, so that every row is wanted.
    sampler = SequenceSampler(SamplingOptions(return_prompt_logprobs=True))
    known = KnownSequence(token_ids, table, len(token_ids) + 1, sampler)
    rows, start = [], 0
    for size in sizes:
        chunk = PlannedChunk("a", known, start, start + size, sample=False)
        batch = pack([chunk], BLOCK_SIZE).batch
        rows.append(model.decoder.logits(model.decoder.forward(batch, layers)))
        start += size
    return torch.cat(rows)


@pytest.mark.parametrize("variant", families.VARIANTS)
def test_every_position_has_the_logits_of_transformers(variant, tmp_path):
    model = families.make(variant, CpuKernels(), tmp_path)
    token_ids = random.Random(0).choices(range(97), k=NUM_TOKENS)
    expected = model.logits(token_ids)
    for sizes in ([NUM_TOKENS], [1] * NUM_TOKENS, [7, 1, 24, 32, 1, 1, 30, 4]):
        got = _logits(model, _layers(model.config), token_ids, sizes)
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("variant", ["mistral", "qwen3", "gpt2", "gpt_neox", "gemma2", "gemma3"])
def test_the_oracle_of_kernels_computes_families_too(variant, tmp_path):
    model = families.make(variant, ReferenceKernels(), tmp_path)
    token_ids = random.Random(0).choices(range(97), k=40)
    got = _logits(model, _layers(model.config), token_ids, [30, 1, 9])
    torch.testing.assert_close(got, model.logits(token_ids), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("variant", ["llama", "gpt2", "gemma2"])
def test_int8_weights_give_the_logits_of_what_they_are_rounded_to(variant, tmp_path):
    parts = Parts("int8", Int8Linear)
    model = families.make(variant, CpuKernels(), tmp_path, parts=parts)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in model.oracle.named_parameters():
            transposed = variant == "gpt2" and ".h." in name  # stored as [in, out]
            is_looked_up = "embed" in name or "wte" in name or "wpe" in name
            if parameter.dim() == 2 and (not is_looked_up or (tied and "wpe" not in name)):
                rounded, scales = quantized(parameter.t() if transposed else parameter)
                near = rounded * scales[:, None]
                parameter.copy_(near.t() if transposed else near)
    token_ids = random.Random(0).choices(range(97), k=40)
    got = _logits(model, _layers(model.config), token_ids, [30, 1, 9])
    torch.testing.assert_close(got, model.logits(token_ids), atol=TOLERANCE, rtol=TOLERANCE)


def test_every_family_is_tried():
    tried = {families.oracle_of(variant).config.model_type for variant in families.VARIANTS}
    assert tried == set(FAMILIES)


@pytest.mark.parametrize(
    ("variant", "change", "named"),
    [
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types: not a list of 3"),
        ("qwen3", {"layer_types": ["full_attention", "mamba", "x"]}, "layer_types: 'mamba'"),
        ("qwen2, windows", {"max_window_layers": -1, "layer_types": None}, "max_window_layers"),
        ("qwen2", {"use_sliding_window": "no"}, "use_sliding_window"),
        ("mistral", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.01}}, "partial_rotary_factor"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"n_head": 3}, "n_head 3"),
        ("gpt2", {"activation_function": "mish"}, "activation_function 'mish'"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim 32"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        ("gemma2", {"sliding_window": None}, "sliding_window"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ],
)
def test_what_a_family_cannot_run_is_refused_by_name(variant, change, named):
    raw = families.oracle_of(variant).config.to_dict()
    with pytest.raises(ModelUnsupported, match=named):
        config_from({**raw, **change})


# Configurations as they stand beside well-known checkpoints, in the spelling of their time.
OLD = {
    "gpt_neox": {
        "vocab_size": 50304,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
        "rotary_emb_base": 5000,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
    },
    "gemma3_text": {
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
    },
}


def test_older_spellings_mean_the_same():
    neox = config_from({"model_type": "gpt_neox", **OLD["gpt_neox"]})
    assert (neox.head_size, neox.num_rotated, neox.ropes[0].theta) == (64, 16, 5000)
    gemma = config_from({"model_type": "gemma3_text", **OLD["gemma3_text"]})
    assert [rope.theta for rope in gemma.ropes] == [1e4, 1e6]
    windows = [layer.window for layer in gemma.layers]
    assert windows == [0 if (n + 1) % 6 == 0 else 512 for n in range(26)]
    assert [layer.rope for layer in gemma.layers] == [int(window == 0) for window in windows]
