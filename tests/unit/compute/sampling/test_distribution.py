"""Draws over many seeds follow the distribution that the options say, and are independent.

Seeds are fixed, so each test passes always or never; a sound sampler fails one in a
thousand of them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from compute.sampling import RowsToDraw, SequenceSampler, sample
from compute.sampling.drawing import uniform
from compute.types import SamplingOptions
from tests.unit.compute.sampling.rows import make_logits

V = 24
PROMPT, GENERATED = [3, 5, 5], [7, 7, 9]
NUM_SEEDS = 2000
SEEDS = np.random.default_rng(11).integers(0, 2**64, NUM_SEEDS, dtype=np.uint64).tolist()
LEAST = 1e-3

OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.8, "top_k": 9},
    {"temperature": 1.5, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.05},
    {"temperature": 1.2, "typical_p": 0.8},
    {"temperature": 1.6, "top_k": 15, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.95},
    {"temperature": 1.3, "repetition_penalty": 1.7, "frequency_penalty": 0.4},
    {"temperature": 1.3, "presence_penalty": -1.5, "logit_bias": ((0, 2.0), (23, -3.0))},
    {"temperature": 1.4, "min_tokens": 9, "stop_token_ids": (1, 2)},
]


def _expected(logits, options):
    """Probabilities by transformers' processors, and those it has not by hand."""
    ids = torch.tensor([PROMPT + GENERATED])
    scores = logits[None].clone()
    if options.logit_bias:
        biases = {(token,): bias for token, bias in options.logit_bias}
        scores = SequenceBiasLogitsProcessor(biases)(ids, scores)
    scores = RepetitionPenaltyLogitsProcessor(float(options.repetition_penalty))(ids, scores)
    for token in set(GENERATED):
        count = GENERATED.count(token)
        scores[0, token] -= options.frequency_penalty * count + options.presence_penalty
    if options.min_tokens > len(GENERATED):
        scores[0, list(options.stop_token_ids)] = -torch.inf
    warpers = LogitsProcessorList([TemperatureLogitsWarper(options.temperature)])
    if options.top_k:
        warpers.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1.0:
        warpers.append(TopPLogitsWarper(options.top_p))
    if options.min_p > 0.0:
        warpers.append(MinPLogitsWarper(options.min_p))
    if options.typical_p < 1.0:
        warpers.append(TypicalLogitsWarper(options.typical_p))
    return torch.softmax(warpers(ids, scores)[0].double(), dim=0).numpy()


def _assert_follows(tokens, probs):
    counts = np.bincount(tokens, minlength=V)
    assert counts[probs == 0].sum() == 0
    expected = probs * len(tokens)
    is_common = expected >= 5  # the rule of thumb for this test
    seen = [*counts[is_common], counts[~is_common].sum()]
    wanted = [*expected[is_common], expected[~is_common].sum()]
    if wanted[-1] < 1e-9:
        del seen[-1], wanted[-1]
    assert len(seen) > 3
    assert stats.chisquare(seen, wanted).pvalue > LEAST


@pytest.mark.parametrize("options", OPTIONS)
def test_draws_follow_the_distribution(options):
    logits = make_logits(V, spread=1.5)
    made = [SamplingOptions(seed=seed, **options) for seed in SEEDS]
    wanted = [
        RowsToDraw(SequenceSampler(each, len(PROMPT)), 0, PROMPT + GENERATED) for each in made
    ]
    tokens = [each.tokens[0].token_id for each in sample(logits[None], wanted)]
    _assert_follows(tokens, _expected(logits, made[0]))


@pytest.mark.parametrize("options", OPTIONS)
def test_draws_behind_guesses_follow_the_distribution(options):
    """The first row forces the guess, so that the second is always drawn from."""
    first = torch.full((V,), -200.0)
    first[GENERATED[-1]] = 200.0
    logits = make_logits(V, seed=1, spread=1.2)
    made = [SamplingOptions(seed=seed, **options) for seed in SEEDS]
    known = PROMPT + GENERATED[:-1]
    wanted = [
        RowsToDraw(SequenceSampler(each, len(PROMPT)), 0, known, guesses=GENERATED[-1:])
        for each in made
    ]
    drawn = sample(torch.stack([first, logits]), wanted)
    assert {each.tokens[0].token_id for each in drawn} == {GENERATED[-1]}
    tokens = [each.tokens[1].token_id for each in drawn]
    _assert_follows(tokens, _expected(logits, made[0]))


def test_the_share_of_right_guesses_is_the_probability_of_the_guess():
    """Guesses do not pull the draw: kept is what would have been drawn anyway."""
    logits = make_logits(V, spread=1.0)
    probs = torch.softmax(logits, dim=0)
    guess = int(probs.argmax())
    wanted = [
        RowsToDraw(
            SequenceSampler(SamplingOptions(temperature=1.0, seed=seed)), 0, [1], guesses=[guess]
        )
        for seed in SEEDS
    ]
    drawn = sample(logits.expand(2, -1), wanted)
    num_right = sum(len(each.tokens) == 2 for each in drawn)
    assert stats.binomtest(num_right, NUM_SEEDS, float(probs[guess])).pvalue > LEAST


NUMBERS = {
    "seeds": [(seed, 0, 7) for seed in range(4000)],
    "far seeds": [(seed, 0, 7) for seed in SEEDS],
    "high seeds": [(seed << 44, 0, 7) for seed in range(4000)],
    "indexes": [(3, index, 7) for index in range(4000)],
    "positions": [(3, 0, position) for position in range(4000)],
    "diagonal": [(n, n, n) for n in range(4000)],
}


def _uniforms(places):
    return np.array(
        [
            uniform(SamplingOptions(seed=seed, sequence_index=index), position)
            for seed, index, position in places
        ]
    )


@pytest.mark.parametrize("name", NUMBERS)
def test_neighbours_are_uniform_and_know_nothing_of_each_other(name):
    numbers = _uniforms(NUMBERS[name])
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert stats.kstest(numbers, "uniform").pvalue > LEAST
    cells, _, _ = np.histogram2d(numbers[:-1], numbers[1:], bins=8, range=[[0, 1], [0, 1]])
    assert stats.chi2_contingency(cells).pvalue > LEAST


@pytest.mark.parametrize("pair", [("seeds", "indexes"), ("seeds", "positions")])
def test_seeds_do_not_stand_for_indexes_or_positions(pair):
    one, other = (_uniforms(NUMBERS[name]) for name in pair)
    assert len(np.intersect1d(one, other)) == 1  # seed 3, index 0, position 7
    cells, _, _ = np.histogram2d(one, other, bins=8, range=[[0, 1], [0, 1]])
    assert stats.chi2_contingency(cells).pvalue > LEAST


def _philox(seed, index, position):
    """The first of the four words of Philox4x64 with 10 rounds: Salmon et al. 2011, section
    3.3; its counter is one ahead."""
    words, keys, mask = [position + 1, 0, 0, 0], [seed, index], 2**64 - 1
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [
            (second >> 64) ^ words[1] ^ keys[0],
            second & mask,
            (first >> 64) ^ words[3] ^ keys[1],
            first & mask,
        ]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & mask, (keys[1] + 0xBB67AE8584CAA73B) & mask]
    return words[0]


@pytest.mark.parametrize("place", [(0, 0, 0), (3, 0, 7), (5, 2, 1), (2**64 - 1, 2**31 - 1, 2**31)])
def test_a_number_is_the_upper_bits_of_philox(place):
    """Sequences that another version resumes must go on alike."""
    assert _uniforms([place])[0] == (_philox(*place) >> 11) / 2**53
