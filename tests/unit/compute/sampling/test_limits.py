"""Limits at their edges, against an oracle in float64 that sorts everything."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compute.sampling.limits import kept_probabilities, kth_largest
from compute.types import SamplingOptions
from tests.unit.compute.sampling.rows import make_logits, tokens_of


def _kept(logits, **options):
    made = SamplingOptions(**{"temperature": 1.0, **options})
    return torch.nonzero(kept_probabilities(logits - logits.max(), made)).flatten().tolist()


def _oracle(logits, top_k, top_p, min_p):
    """Ids that are kept, by one pass down the sorted list."""
    order = sorted(range(len(logits)), key=lambda n: (-logits[n], n))
    if top_k:
        smallest = logits[order[min(top_k, len(order)) - 1]]
        order = [n for n in order if logits[n] >= smallest]
    weights = {n: math.exp(logits[n] - logits[order[0]]) for n in order}
    total = sum(weights.values())
    probs = {n: weight / total for n, weight in weights.items()}
    kept, before = [], 0.0
    for n in order:
        if before < top_p:
            kept.append(n)
        before += probs[n]
    return sorted(n for n in kept if probs[n] >= min_p * probs[order[0]])


@settings(deadline=None)
@given(
    st.lists(st.integers(-12, 12), min_size=1, max_size=40),
    st.sampled_from([0, 1, 2, 7, 39, 41]),
    st.sampled_from([1.0, 0.93, 0.61, 0.27, 1e-9]),
    st.sampled_from([0.0, 0.013, 0.37]),
)
def test_limits_keep_what_a_pass_down_the_sorted_list_keeps(halves, top_k, top_p, min_p):
    """With many equals; thirds of a unit keep sums off the limits."""
    logits = [half / 3 for half in halves]
    got = _kept(torch.tensor(logits), top_k=top_k, top_p=top_p, min_p=min_p)
    assert got == _oracle(logits, top_k, top_p, min_p)


@pytest.mark.parametrize("vocab_size", [1, 2, 511, 512, 513, 5000])
@pytest.mark.parametrize("top_p", [0.50001, 0.99001, 0.999999])
def test_top_p_of_a_flat_distribution_is_a_share_of_the_vocabulary(vocab_size, top_p):
    kept = _kept(torch.zeros(vocab_size), top_p=top_p)
    assert kept == list(range(math.ceil(top_p * vocab_size)))


@pytest.mark.parametrize("temperature", [1e30, 3e38, 1e39, 1e300])
def test_a_huge_temperature_is_uniform_over_what_is_possible(temperature):
    logits = make_logits(12)
    logits[::3] = -math.inf
    probs = kept_probabilities(logits - logits.max(), SamplingOptions(temperature=temperature))
    expected = torch.full((12,), 1 / 8)
    expected[::3] = 0.0
    torch.testing.assert_close(probs, expected)
    choices = [SamplingOptions(temperature=temperature, seed=seed) for seed in range(100)]
    tokens = tokens_of(logits.expand(100, -1), choices, [0] * 100)
    assert {1, 2, 4, 5, 7, 8, 10, 11} == set(tokens)


def test_top_k_keeps_all_that_equal_the_kth():
    assert _kept(torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0]), top_k=2) == [1, 2, 3, 4]


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20), st.data())
def test_the_kth_largest_is_that_of_a_sorted_list(values, data):
    k = data.draw(st.integers(1, len(values)))
    assert kth_largest(torch.tensor(values), k) == sorted(values, reverse=True)[k - 1]


@pytest.mark.parametrize("typical_p", [1e-9, 0.5, 0.999])
def test_typical_p_with_one_token_left_keeps_it(typical_p):
    logits = make_logits(30)
    best = int(logits.argmax())
    assert _kept(logits, top_k=1, typical_p=typical_p) == [best]
    alone = torch.full((30,), -math.inf)
    alone[21] = -4.0
    assert _kept(alone, typical_p=typical_p) == [21]
    assert _kept(torch.zeros(1), typical_p=typical_p) == [0]


def test_typical_p_may_drop_the_likeliest_token():
    """0.4, and many of 0.01: the entropy is near the surprise of those."""
    logits = torch.log(torch.tensor([0.4, *[0.01] * 60]))
    assert _kept(logits, typical_p=0.5) == list(range(1, 61))


def test_limits_leave_their_input_as_it_is():
    shifted = make_logits(100) - 9.0
    before = shifted.clone()
    limits = {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9}
    kept_probabilities(shifted, SamplingOptions(temperature=0.7, **limits))
    assert torch.equal(shifted, before)


def test_something_is_kept_at_every_limit_on_every_shape():
    rng = np.random.default_rng(0)
    for vocab_size in (1, 2, 3, 17, 700):
        for spread in (0.0, 1e-3, 1.0, 100.0):
            logits = torch.from_numpy(rng.normal(0, 1, vocab_size) * spread).float()
            for limits in (
                {"top_p": 1e-300},
                {"typical_p": 1e-300},
                {"min_p": 1.0},
                {"top_k": 1, "top_p": 1e-9, "min_p": 1.0, "typical_p": 1e-9},
                {"temperature": 1e-300, "top_p": 0.5},
            ):
                assert len(_kept(logits, **limits)) >= 1


def test_top_p_that_is_reached_exactly_keeps_no_more():
    assert _kept(torch.zeros(2), top_p=0.5) == [0]
    assert _kept(torch.zeros(8), top_p=0.25) == [0, 1]


def test_limits_just_below_one_keep_something_although_sums_are_rounded():
    for seed in range(40):
        logits = make_logits(50, seed=seed)
        for limits in ({"typical_p": 1 - 2**-53}, {"top_p": 1 - 2**-53}):
            assert len(_kept(logits, **limits)) > 40
