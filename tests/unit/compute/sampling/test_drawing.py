"""Drawing tokens: what limits keep, and what draws depend on."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from compute.sampling import RowsToDraw, SequenceSampler, sample
from compute.sampling.limits import kept_probabilities
from compute.types import SamplingOptions
from tests.unit.compute.sampling.rows import draw_all, make_logits, tokens_of

LIMITS = [
    {},
    {"temperature": 0.5},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"typical_p": 0.5},
    {"typical_p": 0.95},
    {"temperature": 1.7, "top_k": 200, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.8, "top_k": 300, "top_p": 0.95, "min_p": 0.001, "typical_p": 0.9},
    {"typical_p": 1e-9},
    {"top_k": 1},
    {"top_p": 1e-9},
    {"min_p": 1.0},
    {"temperature": 2.0, "top_p": 0.999},
]


def _oracle_probs(logits, options):
    """transformers' warpers in transformers' order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(options.temperature))])
    if options.top_k:
        warpers.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        warpers.append(TopPLogitsWarper(options.top_p))
    if options.min_p:
        warpers.append(MinPLogitsWarper(options.min_p))
    if options.typical_p < 1:
        warpers.append(TypicalLogitsWarper(options.typical_p))
    return torch.softmax(warpers(None, logits[None].clone())[0], dim=0)


def _normalized(probs):
    return probs / probs.sum()


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("spread", [0.1, 2.0, 8.0])
def test_limits_keep_what_the_oracle_keeps(limits, spread):
    options = SamplingOptions(**{"temperature": 1.0, **limits})
    logits = make_logits(spread=spread)
    got = _normalized(kept_probabilities(logits - logits.max(), options))
    expected = _oracle_probs(logits, options)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-4)  # fp32 softmax
    assert ((got > 0) == (expected > 0)).all()


def test_top_p_keeps_the_lower_ids_among_equals():
    probs = kept_probabilities(torch.zeros(10), SamplingOptions(temperature=1.0, top_p=0.35))
    assert torch.nonzero(probs).flatten().tolist() == [0, 1, 2, 3]


def test_greedy_takes_the_lowest_id_among_equals():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert tokens_of(logits, [SamplingOptions()] * 2, [1, 1]) == [1, 0]


def test_a_draw_depends_on_seed_index_and_position_only():
    logits = make_logits()
    options = SamplingOptions(temperature=1.0, seed=11, sequence_index=2)
    [alone] = tokens_of(logits[None], [options], [7])
    others = [SamplingOptions(temperature=0.8, top_p=0.5, seed=n) for n in range(5)]
    batch = torch.stack([*(make_logits(seed=n) for n in range(5)), logits])
    assert tokens_of(batch, [*others, options], [3, 4, 5, 6, 7, 7])[-1] == alone
    drawn = {
        tokens_of(logits[None], [changed], [position])[0]
        for changed, position in [
            (options, 8),
            (SamplingOptions(temperature=1.0, seed=12, sequence_index=2), 7),
            (SamplingOptions(temperature=1.0, seed=11, sequence_index=3), 7),
        ]
    }
    assert drawn != {alone}


def test_a_mixed_batch_gives_each_row_what_it_gets_alone():
    choices = [
        SamplingOptions(return_logprob=True),
        SamplingOptions(temperature=1.0, seed=5, top_k=3, return_logprob=True),
        SamplingOptions(temperature=2.0, seed=6, min_p=0.3),
        SamplingOptions(),
    ]
    batch = torch.stack([make_logits(seed=n) for n in range(4)])
    before = batch.clone()
    together = draw_all(batch, choices, [1, 2, 3, 4])
    for n in range(4):
        assert draw_all(batch[n : n + 1], choices[n : n + 1], [n + 1]) == [together[n]]
    assert torch.equal(batch, before)


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-5])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = make_logits()
    options = SamplingOptions(temperature=temperature)
    assert tokens_of(logits[None], [options], [0]) == [int(logits.argmax())]


def test_extreme_logits_are_drawn_without_overflow():
    logits = torch.tensor([[1e38, -1e38, 9e37, -math.inf]])
    options = SamplingOptions(temperature=0.01, top_p=0.9)
    assert tokens_of(logits, [options], [0]) == [0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad, limits, temperature):
    logits = torch.stack([make_logits(), make_logits()])
    logits[1, 17] = bad
    options = SamplingOptions(**{"temperature": temperature, **limits})
    good, failed = draw_all(logits, [options] * 2, [0, 0])
    assert len(good.tokens) == 1
    assert good.failure is None
    assert failed.tokens == []
    assert failed.failure.reason == "LOGITS_NOT_FINITE"


def test_a_row_without_any_possible_token_fails():
    [drawn] = draw_all(torch.full((1, 9), -math.inf), [SamplingOptions()], [0])
    assert drawn.failure.reason == "LOGITS_NOT_FINITE"


@pytest.mark.parametrize("limits", LIMITS)
def test_impossible_tokens_are_never_drawn(limits):
    logits = make_logits(vocab_size=40)
    logits[::2] = -math.inf
    options = {"temperature": 1.0, "return_logprob": True, **limits}
    drawn = draw_all(
        logits.expand(200, -1),
        [SamplingOptions(seed=seed, **options) for seed in range(200)],
        [3] * 200,
    )
    tokens = [token for each in drawn for token in each.tokens]
    assert len(tokens) == 200
    assert all(token.token_id % 2 == 1 and -math.inf < token.logprob <= 0 for token in tokens)


def test_a_top_k_beyond_the_vocabulary_is_no_limit():
    logits = make_logits(vocab_size=40).expand(100, -1)
    results = [
        draw_all(
            logits,
            [SamplingOptions(temperature=2.0, top_k=top_k, seed=seed) for seed in range(100)],
            [1] * 100,
        )
        for top_k in (0, 40, 41, 2**31 - 1)
    ]
    assert results == [results[0]] * 4


def test_options_at_their_limits_draw_the_most_likely_token():
    logits = make_logits()
    options = SamplingOptions(
        temperature=1e-6,
        top_k=2**31 - 1,
        top_p=1e-38,
        min_p=1.0,
        seed=2**64 - 1,
        sequence_index=2**31 - 1,
    )
    [drawn] = sample(logits[None], [RowsToDraw(SequenceSampler(options), 0, range(2**31 - 1))])
    assert [token.token_id for token in drawn.tokens] == [int(logits.argmax())]


def test_no_rows_give_no_tokens():
    assert sample(torch.empty(0, 10), []) == []
