from __future__ import annotations

import dataclasses
import math

import pytest

from gateway.errors import InvalidField
from gateway.ports import ModelInfo, PoolInfo, SamplingOptions
from gateway.types import GenerationRequest
from gateway.validation import longest_sequence, validate_request, validate_sampling

MODEL = ModelInfo("m", b"f" * 32, 100, 64, PoolInfo(block_size=8, num_blocks=100, generation=1))
SMALL_POOL = dataclasses.replace(MODEL, pool=PoolInfo(8, 4, 1))


def request(**changes):
    return dataclasses.replace(GenerationRequest("r", [1, 2, 3]), **changes)


def refused(model=MODEL, **changes):
    with pytest.raises(InvalidField) as caught:
        validate_request(request(**changes), model)
    return caught.value.field, caught.value.reason


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prompt_ids": [0, 99]},
        {"prompt_ids": [1] * 63},
        {"max_tokens": 61},
        {"stop": ("x",) * 16},
        {"sampling": SamplingOptions(temperature=2, top_k=0, top_p=1, min_p=1, seed=2**64 - 1)},
    ],
)
def test_the_widest_valid_requests_pass(changes):
    validate_request(request(**changes), MODEL)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "x" * 65}, "request_id"),
        ({"prompt_ids": []}, "prompt"),
        ({"prompt_ids": [100]}, "prompt"),
        ({"prompt_ids": [-1]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x",) * 17}, "stop"),
        ({"stop": ("x" * 1025,)}, "stop"),
    ],
)
def test_a_wrong_field_is_named(changes, field):
    assert refused(**changes) == (field, "INVALID_FIELD")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_a_number_out_of_range_is_named(field, value):
    with pytest.raises(InvalidField) as caught:
        validate_sampling(dataclasses.replace(SamplingOptions(), **{field: value}))
    assert caught.value.field == field


def test_what_is_over_the_models_length_is_refused():
    assert refused(prompt_ids=[1] * 64) == ("prompt", "CONTEXT_LENGTH_EXCEEDED")
    assert refused(max_tokens=62) == ("max_tokens", "CONTEXT_LENGTH_EXCEEDED")
    assert refused(max_tokens=10**12) == ("max_tokens", "CONTEXT_LENGTH_EXCEEDED")


def test_what_never_fits_into_the_pool_is_refused():
    assert refused(SMALL_POOL, prompt_ids=[1] * 32) == ("prompt", "PROMPT_EXCEEDS_POOL")
    assert refused(SMALL_POOL, max_tokens=30) == ("max_tokens", "PROMPT_EXCEEDS_POOL")
    validate_request(request(max_tokens=29), SMALL_POOL)


def test_the_longest_sequence_is_the_lesser_of_model_and_pool():
    assert longest_sequence(MODEL) == 64
    assert longest_sequence(SMALL_POOL) == 32
