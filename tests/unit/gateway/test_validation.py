from __future__ import annotations

import dataclasses
import math

import pytest

from gateway.errors import InvalidField
from gateway.ports import ModelInfo, PoolInfo, SamplingOptions
from gateway.types import BeamOptions, GenerationRequest
from gateway.validation import group_blocks, longest_sequence, validate_request, validate_sampling

MODEL = ModelInfo("m", b"f" * 32, 100, 64, PoolInfo(block_size=8, num_blocks=100, generation=1))
DRAWN = SamplingOptions(temperature=1.0)
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
        {"sampling": SamplingOptions(typical_p=1e-9, repetition_penalty=10, min_tokens=61)},
        {"sampling": SamplingOptions(frequency_penalty=-2, presence_penalty=2)},
        {"sampling": SamplingOptions(logit_bias=tuple((i, -100.0) for i in range(100)))},
        {"sampling": SamplingOptions(stop_token_ids=(0, 99) * 32)},
        {"sampling": SamplingOptions(return_prompt_logprobs=True, num_top_logprobs=20)},
        {"n": 64, "sampling": DRAWN, "max_tokens": 1},
        {"n": 2, "best_of": 64, "sampling": DRAWN, "max_tokens": 1},
        {"beams": BeamOptions(32, length_penalty=-10), "n": 32, "max_tokens": 8},
        {"priority": -100, "salt": "s" * 128},
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
        ({"stop": ("",)}, "stop[0]"),
        ({"stop": ("x",) * 17}, "stop"),
        ({"stop": ("y", "x" * 1025)}, "stop[1]"),
        ({"priority": 101}, "priority"),
        ({"priority": -101}, "priority"),
        ({"salt": "é" * 65}, "salt"),
        ({"n": 0}, "n"),
        ({"n": 65, "sampling": DRAWN}, "n"),
        ({"n": 2, "best_of": 1, "sampling": DRAWN}, "best_of"),
        ({"best_of": 65, "sampling": DRAWN}, "best_of"),
        ({"best_of": 0, "sampling": DRAWN}, "best_of"),
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
        ("typical_p", 0),
        ("typical_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", 10.5),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("presence_penalty", math.nan),
        ("min_tokens", -1),
        ("num_top_logprobs", 21),
        ("num_top_logprobs", -1),
    ],
)
def test_a_number_out_of_range_is_named(field, value):
    changed = dataclasses.replace(SamplingOptions(return_logprob=True), **{field: value})
    with pytest.raises(InvalidField) as caught:
        validate_sampling(changed, MODEL.vocab_size)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (SamplingOptions(logit_bias=((5, 0.5), (100, 1.0))), "logit_bias[1].token_id"),
        (SamplingOptions(logit_bias=((-1, 0.5),)), "logit_bias[0].token_id"),
        (SamplingOptions(logit_bias=((5, 0.5), (5, 1.0))), "logit_bias[1].token_id"),
        (SamplingOptions(logit_bias=((5, 100.5),)), "logit_bias[0].bias"),
        (SamplingOptions(logit_bias=((5, math.nan),)), "logit_bias[0].bias"),
        (SamplingOptions(logit_bias=((5, 0.0),) * 1025), "logit_bias"),
        (SamplingOptions(stop_token_ids=(1, 100)), "stop_token_ids[1]"),
        (SamplingOptions(stop_token_ids=(1,) * 65), "stop_token_ids"),
        (SamplingOptions(num_top_logprobs=1), "num_top_logprobs"),
        (SamplingOptions(min_tokens=62), "min_tokens"),
        (SamplingOptions(min_tokens=1, grammar="g"), "min_tokens"),
    ],
    ids=str,
)
def test_a_wrong_sampling_option_is_named(sampling, field):
    assert refused(sampling=sampling)[0] == field


def test_no_more_tokens_can_be_asked_for_at_least_than_at_most():
    assert refused(sampling=SamplingOptions(min_tokens=5), max_tokens=4)[0] == "min_tokens"
    validate_request(request(sampling=SamplingOptions(min_tokens=4), max_tokens=4), MODEL)


def test_a_structured_answer_must_be_able_to_end():
    sampling = SamplingOptions(grammar="g")
    assert refused(sampling=sampling, ignore_eos=True)[0] == "ignore_eos"


@pytest.mark.parametrize(("changes", "field"), [({"n": 2}, "n"), ({"best_of": 2}, "best_of")])
def test_several_greedy_answers_would_be_the_same(changes, field):
    assert refused(**changes)[0] == field
    validate_request(request(sampling=DRAWN, **changes), MODEL)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"beams": BeamOptions(1)}, "num_beams"),
        ({"beams": BeamOptions(33)}, "num_beams"),
        ({"beams": BeamOptions(2, length_penalty=10.5)}, "length_penalty"),
        ({"beams": BeamOptions(2, length_penalty=math.nan)}, "length_penalty"),
        ({"n": 3}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"sampling": DRAWN}, "temperature"),
        ({"stop": ("x",)}, "stop"),
        ({"sampling": SamplingOptions(return_logprob=True)}, "return_logprob"),
        ({"sampling": SamplingOptions(return_prompt_logprobs=True)}, "return_prompt_logprobs"),
        ({"sampling": SamplingOptions(grammar="g")}, "grammar"),
    ],
    ids=str,
)
def test_what_contradicts_a_beam_search_is_named(changes, field):
    assert refused(**{"beams": BeamOptions(2), **changes})[0] == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"n": 5, "sampling": DRAWN}, "n"),
        ({"best_of": 5, "sampling": DRAWN}, "best_of"),
        ({"beams": BeamOptions(5)}, "num_beams"),
    ],
)
def test_more_sequences_than_ever_run_at_once_are_refused(changes, field):
    with pytest.raises(InvalidField) as caught:
        validate_request(request(**changes), MODEL, 4)
    assert caught.value.field == field
    validate_request(request(**changes), MODEL, 5)


def test_sequences_that_never_fit_together_are_refused_at_once():
    # 17 tokens of prompt: 2 blocks for all and, with 7 more, one for each.
    prompt = [1] * 17
    exact = {"prompt_ids": prompt, "max_tokens": 7, "sampling": DRAWN}
    validate_request(request(n=2, **exact), SMALL_POOL)
    assert refused(SMALL_POOL, n=3, **exact) == ("n", "PROMPT_EXCEEDS_POOL")
    assert refused(SMALL_POOL, n=2, **exact | {"max_tokens": 8}) == ("n", "PROMPT_EXCEEDS_POOL")
    assert refused(SMALL_POOL, n=3, **exact | {"max_tokens": None})[0] == "n"
    beams = {"beams": BeamOptions(3), "prompt_ids": prompt}
    assert refused(SMALL_POOL, **beams) == ("num_beams", "PROMPT_EXCEEDS_POOL")


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 5])
@pytest.mark.parametrize("num_prompt_tokens", [1, 7, 8, 9, 16, 40])
def test_the_longest_length_of_a_group_just_fits(num_prompt_tokens, num_sequences):
    long = dataclasses.replace(MODEL, max_sequence_length=10_000)
    longest = longest_sequence(long, num_prompt_tokens, num_sequences)
    assert group_blocks(num_prompt_tokens, longest, num_sequences, 8) <= 100
    assert group_blocks(num_prompt_tokens, longest + 1, num_sequences, 8) > 100


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
