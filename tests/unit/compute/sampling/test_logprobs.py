"""Log-probabilities and the likeliest tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compute.sampling import scored
from compute.sampling.logprobs import likeliest
from compute.types import SamplingOptions
from tests.unit.compute.sampling.rows import draw_all, make_logits


def test_log_probabilities_are_those_of_the_unmodified_softmax():
    logits = make_logits()
    plain = SamplingOptions(return_logprob=True)
    strange = SamplingOptions(
        temperature=0.3, top_k=2, logit_bias=((5, 100.0),), return_logprob=True, num_top_logprobs=3
    )
    silent = SamplingOptions(temperature=0.3, top_k=2, logit_bias=((5, 100.0),))
    expected = torch.log_softmax(logits, dim=0)
    first, second, third = draw_all(logits.expand(3, -1), [plain, strange, silent], [4, 4, 4])
    for drawn in (first, second):
        [token] = drawn.tokens
        assert token.logprob == pytest.approx(float(expected[token.token_id]), abs=1e-5)
    [token] = second.tokens
    assert token.token_id == 5
    best = expected.topk(3)
    assert [top.token_id for top in token.top] == best.indices.tolist()
    assert [top.logprob for top in token.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert third.tokens == [(5, None, ())]


def test_the_likeliest_come_best_first_the_lower_id_among_equals():
    scores = torch.tensor([1.0, 3.0, 2.0, 3.0, -math.inf, 2.0])
    assert [token for token, _ in likeliest(scores, 4)] == [1, 3, 2, 5]
    assert [token for token, _ in likeliest(scores, 3)] == [1, 3, 2]
    assert [token for token, _ in likeliest(scores, 100)] == [1, 3, 2, 5, 0]
    assert likeliest(scores, 0) == []


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([-math.inf, -2.5, -1.0, 0.0, 1.5, 3.0]), min_size=1, max_size=30),
    st.integers(0, 40),
)
def test_the_likeliest_are_the_first_of_a_sorted_list(values, count):
    by_rank = sorted(range(len(values)), key=lambda n: (-values[n], n))[:count]
    expected = [(n, values[n]) for n in by_rank if values[n] > -math.inf]
    assert likeliest(torch.tensor(values), count) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scores_are_of_the_row_in_fp32(dtype):
    logits = make_logits(spread=5.0).to(dtype)
    expected = torch.log_softmax(logits.double(), dim=0)
    logprob, top = scored(logits, 17, 20)
    assert logprob == pytest.approx(float(expected[17]), abs=1e-5)
    best = torch.topk(logits.float(), 20)
    assert logits[[token for token, _ in top]].float().tolist() == best.values.tolist()
    assert [value for _, value in top] == pytest.approx(
        expected[[token for token, _ in top]].tolist(), abs=1e-5
    )


def test_a_rows_scores_do_not_depend_on_the_batch():
    options = SamplingOptions(return_logprob=True, num_top_logprobs=7)
    rows = torch.stack([make_logits(4099, seed=n) for n in range(9)])
    together = draw_all(rows, [options] * 9, [1] * 9)
    for n, drawn in enumerate(together):
        assert draw_all(rows[n : n + 1], [options], [1]) == [drawn]


def test_what_the_logits_rule_out_is_not_among_the_likeliest():
    logits = torch.full((1, 30), -math.inf)
    logits[0, [3, 9]] = torch.tensor([1.0, 2.0])
    options = SamplingOptions(return_logprob=True, num_top_logprobs=20)
    [drawn] = draw_all(logits, [options], [0])
    [token] = drawn.tokens
    assert [top.token_id for top in token.top] == [9, 3]
    assert sum(math.exp(top.logprob) for top in token.top) == pytest.approx(1.0)
