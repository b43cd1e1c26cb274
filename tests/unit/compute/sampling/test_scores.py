"""Biases, penalties and forbidden stops against transformers' processors; log-probabilities."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from compute.sampling import RowsToDraw, SequenceSampler, sample
from compute.sampling.logprobs import likeliest
from compute.types import SamplingOptions
from tests.unit.compute.sampling.rows import draw_all, make_logits

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


@given(
    st.lists(st.integers(0, 11), min_size=1, max_size=8),
    st.lists(st.one_of(st.integers(0, 11), st.just("pop"), st.just("known")), max_size=30),
)
def test_counts_kept_along_the_way_are_those_counted_from_scratch(prompt, events):
    """push, pop and catch_up in any order that a step could bring."""
    logits = make_logits(12)
    sampler = SequenceSampler(PENALTIES, len(prompt))
    known, trial = list(prompt), []
    sampler.catch_up(known)
    for event in events:
        if event == "known":
            while trial:
                sampler.pop(trial.pop())
            known.append((len(known) * 5) % 12)
            sampler.catch_up(known)
        elif event == "pop":
            if trial:
                sampler.pop(trial.pop())
        else:
            sampler.push(event)
            trial.append(event)
        fresh = SequenceSampler(PENALTIES, len(prompt))
        fresh.catch_up([*known, *trial])
        position = len(known) + len(trial)
        assert torch.equal(sampler.processed(logits, position), fresh.processed(logits, position))


def _logits_after(tokens) -> torch.Tensor:
    """A model: logits that depend on all tokens before."""
    return make_logits(12, seed=hash(tuple(tokens)) % 2**31, spread=1.5)


@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 11), max_size=5),
    st.integers(0, 5),
    st.booleans(),
)
def test_guesses_whatever_they_are_change_no_token(seed, guesses, num_right, greedy):
    options = SamplingOptions(
        temperature=0.0 if greedy else 0.8,
        seed=seed,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        min_tokens=3,
        stop_token_ids=(1,),
        return_logprob=True,
    )
    prompt = [4, 7]
    alone, tokens = [], list(prompt)
    stepwise = SequenceSampler(options, 2)
    for _ in range(len(guesses) + 1):
        [drawn] = sample(_logits_after(tokens)[None], [RowsToDraw(stepwise, 0, tokens)])
        alone += drawn.tokens
        tokens.append(drawn.tokens[0].token_id)
    right = [token.token_id for token in alone]
    guesses = [*right[: min(num_right, len(guesses))], *guesses[num_right:]]
    rows = torch.stack([_logits_after([*prompt, *guesses[:n]]) for n in range(len(guesses) + 1)])
    sampler = SequenceSampler(options, 2)
    [drawn] = sample(rows, [RowsToDraw(sampler, 0, prompt, guesses=guesses)])
    num_accepted = next((n for n, g in enumerate(guesses) if g != right[n]), len(guesses))
    assert drawn.tokens == alone[: num_accepted + 1]
    # Nothing of the guesses is left behind.
    [again] = sample(rows, [RowsToDraw(sampler, 0, prompt)])
    assert again.tokens == alone[:1]


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


def test_candidates_are_log_probabilities_after_penalties():
    """As in transformers' beam search: the processors are applied to log-softmax."""
    logits = make_logits(V)
    options = SamplingOptions(
        num_candidates=6, repetition_penalty=1.5, min_tokens=20, stop_token_ids=(9,)
    )
    sampler = SequenceSampler(options, len(PROMPT))
    [drawn] = sample(logits[None], [RowsToDraw(sampler, 0, TOKENS)])
    scores = RepetitionPenaltyLogitsProcessor(1.5)(IDS, torch.log_softmax(logits, dim=0)[None])[0]
    scores[9] = -math.inf
    best = scores.topk(6)
    assert drawn.tokens == []
    assert [token.token_id for token in drawn.candidates] == best.indices.tolist()
    got = [token.logprob for token in drawn.candidates]
    assert got == pytest.approx(best.values.tolist(), abs=1e-5)


def test_candidates_are_what_is_possible_and_no_more():
    logits = torch.full((1, 10), -math.inf)
    logits[0, [2, 7]] = 1.0
    [drawn] = draw_all(logits, [SamplingOptions(num_candidates=4)], [3])
    assert [token.token_id for token in drawn.candidates] == [2, 7]


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


def test_draws_under_penalties_follow_the_penalized_distribution():
    logits = make_logits(10, spread=1.0)
    rng = random.Random(0)
    counts = [0] * 10
    tokens = [1, 2, 3, 3, 3, 7]
    for _ in range(3000):
        options = SamplingOptions(
            temperature=1.1, seed=rng.getrandbits(64), repetition_penalty=1.5, presence_penalty=1.0
        )
        [drawn] = sample(logits[None], [RowsToDraw(SequenceSampler(options, 2), 0, tokens)])
        counts[drawn.tokens[0].token_id] += 1
    scores = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([tokens]), logits[None].clone())[0]
    scores[[3, 7]] -= 1.0
    probs = torch.softmax(scores / 1.1, dim=0).tolist()
    chi_square = sum((counts[n] - 3000 * p) ** 2 / (3000 * p) for n, p in enumerate(probs))
    assert chi_square < 27.9  # 1 in 1000 at 9 degrees of freedom
