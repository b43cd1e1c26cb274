"""Which sampling options the step contract takes."""

from __future__ import annotations

import math

import pytest

from compute.errors import InvalidStep
from compute.sampling import check_options
from compute.types import SamplingOptions

OUT_OF_RANGE = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("typical_p", 0.0),
    ("typical_p", 1.01),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.nan),
    ("repetition_penalty", 10.1),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", math.nan),
    ("presence_penalty", 2.1),
    ("min_tokens", -1),
    ("min_tokens", 2**31),
    ("seed", -1),
    ("seed", 2**64),
    ("sequence_index", -1),
    ("num_top_logprobs", -1),
    ("num_top_logprobs", 21),
    ("num_candidates", -1),
    ("num_candidates", 51),
    ("logit_bias", ((50, 1.0),)),
    ("logit_bias", ((-1, 1.0),)),
    ("logit_bias", ((3, 100.5),)),
    ("logit_bias", ((3, math.nan),)),
    ("logit_bias", ((3, 1.0), (3, 2.0))),
    ("logit_bias", tuple((n, 1.0) for n in range(1025))),
    ("stop_token_ids", (50,)),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (1,) * 129),
]


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE)
def test_options_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(InvalidStep, match=field) as caught:
        check_options("a", SamplingOptions(**{field: value}), 50)
    assert caught.value.metadata == {"sequence_id": "a", "field": field}


def test_all_the_stop_tokens_of_a_client_and_the_models_own_are_taken():
    """The gateway lets a client name 64 and adds those of the model."""
    check_options("a", SamplingOptions(stop_token_ids=tuple(range(64 + 5))), 100)


def test_options_at_their_limits_are_valid():
    check_options("a", SamplingOptions(), 50)
    check_options(
        "a",
        SamplingOptions(
            temperature=100.0,
            top_k=10**9,
            top_p=1e-9,
            min_p=1.0,
            typical_p=1e-9,
            repetition_penalty=10.0,
            frequency_penalty=-2.0,
            presence_penalty=2.0,
            logit_bias=((0, -100.0), (49, 100.0)),
            min_tokens=2**31 - 1,
            stop_token_ids=(0, 49),
            seed=2**64 - 1,
            sequence_index=7,
            num_top_logprobs=20,
            num_candidates=50,
        ),
        50,
    )
