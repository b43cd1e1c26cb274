"""Biases, penalties and forbidden stops against transformers' processors."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from compute.sampling import RowsToDraw, SequenceSampler, sample
from compute.types import SamplingOptions
from tests.unit.compute.sampling.rows import make_logits

V = 60
PROMPT = [3, 3, 17, 40, 8, 3]
GENERATED = [17, 5, 5, 5, 59, 0]
TOKENS = PROMPT + GENERATED
IDS = torch.tensor([TOKENS])


def _processed(logits, **options):
    sampler = SequenceSampler(SamplingOptions(**options), len(PROMPT))
    before = logits.clone()
    sampler.catch_up(TOKENS)
    scores = sampler.processed(logits, len(TOKENS))
    assert torch.equal(logits, before)
    return scores


@pytest.mark.parametrize("penalty", [0.3, 0.9, 1.1, 10.0])
def test_the_repetition_penalty_is_transformers(penalty):
    logits = make_logits(V)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(IDS, logits[None].clone())[0]
    torch.testing.assert_close(_processed(logits, repetition_penalty=penalty), expected)


def test_biases_are_transformers():
    logits = make_logits(V)
    biases = {0: 5.0, 17: -100.0, 59: 0.25, 30: 100.0}
    oracle = SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases.items()})
    got = _processed(logits, logit_bias=tuple(biases.items()))
    torch.testing.assert_close(got, oracle(IDS, logits[None].clone())[0])


@pytest.mark.parametrize(("least", "is_free"), [(5, True), (6, True), (7, False), (100, False)])
def test_no_stop_comes_before_min_tokens(least, is_free):
    logits = make_logits(V)
    oracle = MinNewTokensLengthLogitsProcessor(len(PROMPT), least, [9, 17], device="cpu")
    expected = oracle(IDS, logits[None].clone())[0]
    got = _processed(logits, min_tokens=least, stop_token_ids=(9, 17))
    torch.testing.assert_close(got, expected)
    assert bool(torch.isfinite(got).all()) is is_free


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0.0), (0.0, -1.5), (2.0, 1.25)])
def test_frequency_and_presence_count_generated_tokens_alone(frequency, presence):
    logits = make_logits(V)
    expected = logits.clone()
    for token in set(GENERATED):
        expected[token] -= frequency * GENERATED.count(token) + presence
    got = _processed(logits, frequency_penalty=frequency, presence_penalty=presence)
    torch.testing.assert_close(got, expected)


def test_all_together_in_the_stated_order():
    logits = make_logits(V)
    expected = logits.clone()
    expected[5] += 3.0
    expected = RepetitionPenaltyLogitsProcessor(1.4)(IDS, expected[None])[0]
    for token in set(GENERATED):
        expected[token] -= 0.5 * GENERATED.count(token) + 0.25
    expected[[5, 6]] = -math.inf
    got = _processed(
        logits,
        logit_bias=((5, 3.0),),
        repetition_penalty=1.4,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        min_tokens=7,
        stop_token_ids=(5, 6),
    )
    torch.testing.assert_close(got, expected)


PENALTIES = SamplingOptions(
    temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4
)


def test_forbidding_everything_fails_the_sequence_alone():
    logits = make_logits(10).expand(2, -1)
    nothing = SamplingOptions(stop_token_ids=tuple(range(10)), min_tokens=1)
    for options in (nothing, SamplingOptions(num_candidates=2, **_without_defaults(nothing))):
        sampler = SequenceSampler(options, 2)
        wanted = [RowsToDraw(sampler, 0, [1, 2]), RowsToDraw(SequenceSampler(PENALTIES), 1, [1])]
        failed, drawn = sample(logits, wanted)
        assert failed.failure.reason == "NO_TOKEN_ALLOWED"
        assert len(drawn.tokens) == 1


def _without_defaults(options):
    return {"stop_token_ids": options.stop_token_ids, "min_tokens": options.min_tokens}


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e-9, 1e-3, 10.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_penalty_makes_a_row_look_broken(penalty, temperature):
    """Nor lifts a token that the logits rule out."""
    logits = torch.tensor([[-math.inf, -1e30, 0.0, 1e-3, 3e38, -3e38]])
    options = SamplingOptions(temperature=temperature, repetition_penalty=penalty)
    [drawn] = sample(logits, [RowsToDraw(SequenceSampler(options, 6), 0, range(6))])
    assert [token.token_id for token in drawn.tokens] == [4]
    [drawn] = sample(logits[:, :4], [RowsToDraw(SequenceSampler(options, 4), 0, range(4))])
    [token] = drawn.tokens
    assert token.token_id == 3 if penalty < 1e-3 else token.token_id in (2, 3)


def test_a_tiny_repetition_penalty_takes_the_best_token_that_was_met():
    logits = torch.tensor([[9.0, 2.0, 3.0, 1.0]])
    options = SamplingOptions(repetition_penalty=1e-300)
    [drawn] = sample(logits, [RowsToDraw(SequenceSampler(options, 2), 0, [1, 2])])
    assert [token.token_id for token in drawn.tokens] == [2]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_biases_of_a_hundred_force_and_forbid(temperature):
    logits = make_logits(V).expand(50, -1)
    best = int(logits[0].argmax())
    for biases, allowed in [
        (((7, 100.0),), {7}),
        (((7, 100.0), (8, 100.0)), {7, 8}),
        (((best, -100.0),), set(range(V)) - {best}),
        (tuple((n, -100.0) for n in range(V) if n != 41), {41}),
    ]:
        wanted = [
            RowsToDraw(
                SequenceSampler(
                    SamplingOptions(temperature=temperature, seed=seed, logit_bias=biases)
                ),
                seed,
                [0],
            )
            for seed in range(50)
        ]
        tokens = {token.token_id for drawn in sample(logits, wanted) for token in drawn.tokens}
        assert tokens
        assert tokens <= allowed


def test_samplers_without_options_are_plain_and_others_are_not():
    assert SequenceSampler(SamplingOptions(temperature=1.0, top_k=3, num_candidates=2)).is_plain
    for options in (
        {"repetition_penalty": 1.1},
        {"frequency_penalty": -0.1},
        {"presence_penalty": 0.1},
        {"logit_bias": ((0, 0.0),)},
        {"min_tokens": 1},
    ):
        assert not SequenceSampler(SamplingOptions(**options)).is_plain
