"""Candidates, for beams: the likeliest next tokens instead of a draw."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from compute.sampling import RowsToDraw, SequenceSampler, sample
from compute.types import SamplingOptions
from tests.unit.compute.sampling.rows import draw_all, make_logits

V = 60
PROMPT = [3, 3, 17, 40, 8, 3]
TOKENS = [*PROMPT, 17, 5, 5, 5, 59, 0]
IDS = torch.tensor([TOKENS])


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


def test_all_tokens_are_candidates_if_so_many_are_asked_for():
    logits = make_logits(V)[None]
    expected = torch.sort(torch.log_softmax(logits[0], dim=0), descending=True)
    for count in (V, V + 1, 10 * V):
        [drawn] = draw_all(logits, [SamplingOptions(num_candidates=count)], [3])
        assert [token.token_id for token in drawn.candidates] == expected.indices.tolist()
        assert [token.logprob for token in drawn.candidates] == pytest.approx(
            expected.values.tolist(), abs=1e-5
        )


def test_candidates_do_not_depend_on_temperature_limits_or_seed():
    logits = make_logits(V).expand(3, -1)
    choices = [
        SamplingOptions(num_candidates=5),
        SamplingOptions(num_candidates=5, temperature=1.5, top_k=1, seed=4),
        SamplingOptions(num_candidates=5, temperature=0.1, top_p=0.1, min_p=0.9, typical_p=0.1),
    ]
    first, *others = draw_all(logits, choices, [2, 3, 4])
    assert len(first.candidates) == 5
    assert others == [first, first]


def test_the_lower_id_comes_first_among_equal_candidates():
    [drawn] = draw_all(torch.zeros(1, 700), [SamplingOptions(num_candidates=4)], [0])
    assert [token.token_id for token in drawn.candidates] == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_has_no_candidates(bad):
    logits = torch.stack([make_logits(V), make_logits(V)])
    logits[0, 17] = bad
    failed, drawn = draw_all(logits, [SamplingOptions(num_candidates=3)] * 2, [1, 1])
    assert failed.failure.reason == "LOGITS_NOT_FINITE"
    assert failed.candidates == []
    assert len(drawn.candidates) == 3


def test_biases_of_a_hundred_put_candidates_first_and_last():
    logits = make_logits(V)[None]
    options = SamplingOptions(num_candidates=V, logit_bias=((11, 100.0), (12, -100.0)))
    [drawn] = draw_all(logits, [options], [4])
    assert drawn.candidates[0].token_id == 11
    assert drawn.candidates[-1].token_id == 12


def test_sent_tokens_count_for_candidates_and_are_forgotten_again():
    logits = make_logits(V)[None]
    options = SamplingOptions(num_candidates=V, repetition_penalty=2.0, presence_penalty=1.0)
    sampler = SequenceSampler(options, len(PROMPT))
    [anew] = sample(logits, [RowsToDraw(SequenceSampler(options, len(PROMPT)), 0, [*PROMPT, 5, 9])])
    [bare] = sample(logits, [RowsToDraw(SequenceSampler(options, len(PROMPT)), 0, PROMPT)])
    assert bare != anew
    for sent, expected in [([5, 9], anew), ([], bare), ([5, 9], anew)]:
        assert sample(logits, [RowsToDraw(sampler, 0, PROMPT, sent)]) == [expected]
