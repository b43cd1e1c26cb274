"""Frequencies and tables equal those of transformers, bit for bit."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from compute.errors import ModelUnsupported
from compute.rope import RopeConfig, RopeTables, inverse_frequencies, rope_tables

HEAD_SIZE = 64
MAX_POSITIONS = 512

VARIANTS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, betas": {
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn, mscale": {
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "yarn, attention factor": {
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.25,
    },
    "longrope": {
        "short_factor": [1.0 + n / 50 for n in range(32)],
        "long_factor": [2.0 + n / 3 for n in range(32)],
        "original_max_position_embeddings": 128,
    },
    "longrope, factor": {
        "short_factor": [1.0] * 32,
        "long_factor": [4.0] * 32,
        "factor": 16.0,
        "original_max_position_embeddings": 128,
    },
    "proportional": {"partial_rotary_factor": 0.25},
    "proportional, factor": {"partial_rotary_factor": 0.5, "factor": 8.0},
}


def _raw(variant, theta=10000.0):
    kind = variant.partition(",")[0]
    return {
        "rope_parameters": {"rope_type": kind, "rope_theta": theta, **VARIANTS[variant]},
    }


def _both(variant, theta=10000.0):
    raw = _raw(variant, theta)
    ours = RopeConfig.from_dict(raw, HEAD_SIZE, MAX_POSITIONS)
    oracle = LlamaConfig(
        hidden_size=HEAD_SIZE * 2,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        **raw,
    )
    return ours, oracle


def test_every_type_of_transformers_is_known():
    tested = {variant.partition(",")[0] for variant in VARIANTS}
    assert ROPE_INIT_FUNCTIONS.keys() <= tested


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tables_equal_the_oracles(variant, theta):
    ours, oracle = _both(variant, theta)
    length = ours.max_exact_length
    cos, sin = rope_tables(ours, length)
    expected_cos, expected_sin = LlamaRotaryEmbedding(oracle)(
        torch.zeros(1), torch.arange(length)[None]
    )
    assert torch.equal(cos, expected_cos[0])
    assert torch.equal(sin, expected_sin[0])


@pytest.mark.parametrize("seq_len", [1, 128, 129, 512, 513, 2000])
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "default"])
def test_frequencies_equal_the_oracles_at_any_length(variant, seq_len):
    ours, oracle = _both(variant)
    expected, expected_scaling = ROPE_INIT_FUNCTIONS[ours.kind](oracle, seq_len=seq_len)
    frequencies, scaling = inverse_frequencies(ours, seq_len)
    assert torch.equal(frequencies, expected)
    assert scaling == expected_scaling


def test_the_older_spelling_means_the_same():
    newer = _raw("llama3", 500000.0)["rope_parameters"]
    older = {key: value for key, value in newer.items() if key != "rope_theta"}
    read = RopeConfig.from_dict(
        {"rope_theta": 500000.0, "rope_scaling": older}, HEAD_SIZE, MAX_POSITIONS
    )
    assert read == RopeConfig.from_dict({"rope_parameters": newer}, HEAD_SIZE, MAX_POSITIONS)
    oldest = {"type": "linear", "factor": 4.0}
    read = RopeConfig.from_dict({"rope_scaling": oldest}, HEAD_SIZE, MAX_POSITIONS)
    assert read == RopeConfig.from_dict(_raw("linear"), HEAD_SIZE, MAX_POSITIONS)


@pytest.mark.parametrize(
    ("variant", "limit"),
    [("longrope", 128), ("dynamic", MAX_POSITIONS), ("yarn", MAX_POSITIONS)],
)
def test_tables_end_where_frequencies_would_change_with_the_length(variant, limit):
    ours, _ = _both(variant)
    assert ours.max_exact_length == limit
    with pytest.raises(ValueError, match="exact up to"):
        rope_tables(ours, limit + 1)


def test_tables_grow_with_the_positions_asked_for():
    rope = RopeConfig.from_dict({}, 8, 10**9)  # 64 GB if it were filled
    tables = RopeTables(rope, 8)
    before = tables.rows(torch.tensor([5, 8191]))
    for positions in ([8192, 0], [30_000], [5, 8191]):
        got = tables.rows(torch.tensor(positions))
        cos, sin = rope_tables(rope, max(positions) + 1)
        torch.testing.assert_close(got, (cos[positions], sin[positions]), atol=1e-6, rtol=0)
    torch.testing.assert_close(got, before, atol=1e-6, rtol=0)


def test_positions_beyond_the_exact_length_have_no_rows():
    tables = RopeTables(RopeConfig.from_dict({}, HEAD_SIZE, MAX_POSITIONS), HEAD_SIZE)
    tables.rows(torch.tensor([MAX_POSITIONS - 1]))
    with pytest.raises(ValueError, match=f"exact up to {MAX_POSITIONS}"):
        tables.rows(torch.tensor([0, MAX_POSITIONS]))


@pytest.mark.parametrize("parameters", ["default", [1], {"rope_type": ["default"]}])
def test_parameters_of_the_wrong_kind_are_refused(parameters):
    with pytest.raises(ModelUnsupported, match=r"rope_type|RoPE parameters"):
        RopeConfig.from_dict({"rope_parameters": parameters}, HEAD_SIZE, MAX_POSITIONS)


@pytest.mark.parametrize("theta", ["big", -1.0, float("nan"), float("inf"), 10**400, [1e4], True])
def test_a_theta_that_is_no_positive_number_is_refused(theta):
    for raw in ({"rope_theta": theta}, {"rope_parameters": {"rope_theta": theta}}):
        with pytest.raises(ModelUnsupported, match="rope_theta"):
            RopeConfig.from_dict(raw, HEAD_SIZE, MAX_POSITIONS)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "spiral"}, "spiral"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "linear"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "long_factor"),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 5, "long_factor": [1.0] * 5},
            "longrope",
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        # One entry would be spread over all frequencies.
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "has 1 entries"),
        ({"rope_type": "yarn", "factor": "four"}, "yarn"),
        ({"rope_type": "dynamic", "factor": 10**400}, "dynamic"),
    ],
)
def test_parameters_that_cannot_be_used_are_refused_by_name(parameters, named):
    with pytest.raises(ModelUnsupported, match=named):
        RopeConfig.from_dict({"rope_parameters": parameters}, HEAD_SIZE, MAX_POSITIONS)
