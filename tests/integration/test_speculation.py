"""Guesses change no distribution: chi-square over seeds, with and without them."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from gateway.ports import SamplingOptions
from gateway.speculation import SpeculationMethod
from gateway.types import GenerationRequest
from tests.integration.local import answers, make_tiny, prompts, started

NUM_SEEDS = 1500
TOKENS = (5, 6, 7)  # the others are biased away
LENGTH = 4
TEMPERATURE = 1.3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    return directory, make_tiny(directory)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    directory = tmp_path_factory.mktemp("draft")
    make_tiny(directory, num_hidden_layers=1)
    return directory


def _distribution(oracle, prompt) -> dict[tuple[int, ...], float]:
    """Every text of LENGTH tokens that can be drawn, with its probability."""
    texts = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for text, probability in texts.items():
            with torch.inference_mode():
                logits = oracle(torch.tensor([[*prompt, *text]])).logits[0, -1]
            probs = torch.softmax(logits[list(TOKENS)] / TEMPERATURE, dim=0).tolist()
            for token, prob in zip(TOKENS, probs, strict=True):
                longer[(*text, token)] = probability * prob
        texts = longer
    return texts


def _p_value(found: list[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    assert set(found) <= set(expected)
    # Rare texts together, so that the statistic is near its distribution.
    common = [text for text, prob in expected.items() if prob * len(found) >= 5]
    counts = [found.count(text) for text in common]
    wanted = [expected[text] * len(found) for text in common]
    counts.append(len(found) - sum(counts))
    wanted.append(len(found) - sum(wanted))
    if wanted[-1] < 5:
        counts[-2:], wanted[-2:] = [sum(counts[-2:])], [sum(wanted[-2:])]
    return float(stats.chisquare(counts, wanted).pvalue)


async def _draw(directory, prompt, **settings):
    bias = tuple((token, 100.0) for token in TOKENS)
    requests = [
        GenerationRequest(
            str(seed),
            prompt,
            LENGTH,
            SamplingOptions(temperature=TEMPERATURE, logit_bias=bias, seed=seed),
            ignore_eos=True,
        )
        for seed in range(NUM_SEEDS)
    ]
    texts = []
    async with started(directory, num_blocks=2048, max_waiting=NUM_SEEDS, **settings) as quire:
        for some in _parts(requests, 250):
            texts += [tuple(got.token_ids[0]) for got in await answers(quire, some)]
        return texts, quire.engine.stats().speculation


def _parts(items, size):
    return [items[n : n + size] for n in range(0, len(items), size)]


async def test_samples_follow_the_distribution_with_and_without_guesses(tiny, draft):
    directory, oracle = tiny
    # Every pair of the tokens is in it, so that there is something to look up.
    prompt = [5, 5, 6, 6, 7, 7, 5, 7, 6, 5, 6, 7]
    expected = _distribution(oracle, prompt)
    assert len(expected) == len(TOKENS) ** LENGTH
    assert sum(expected.values()) == pytest.approx(1.0)
    plain, _ = await _draw(directory, prompt)
    # Seeds are fixed: this passes always or never; 1 in 1000 for a sound sampler.
    assert _p_value(plain, expected) > 1e-3
    for settings in (
        {"speculation": SpeculationMethod.NGRAM},
        {"speculation": SpeculationMethod.DRAFT, "draft": draft},
    ):
        guessed, counters = await _draw(directory, prompt, **settings)
        assert counters.num_drafted > NUM_SEEDS / 4
        assert _p_value(guessed, expected) > 1e-3
        assert guessed == plain
    # The test can fail: another temperature is told apart.
    skewed = {text: prob**1.5 for text, prob in expected.items()}
    total = sum(skewed.values())
    assert _p_value(plain, {text: prob / total for text, prob in skewed.items()}) < 1e-3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_right_guesses_save_steps(tiny, temperature):
    """A model that guesses for itself is right; looking up helps where a text repeats."""
    directory, _ = tiny
    [prompt] = prompts(1, 12)
    sampling = SamplingOptions(temperature=temperature, seed=3)
    request = GenerationRequest("x", prompt, 41, sampling, ignore_eos=True)
    async with started(directory) as quire:
        [plain] = await answers(quire, [request])
        num_plain = quire.engine.stats().counters.num_steps
    async with started(
        directory, draft=directory, speculation=SpeculationMethod.DRAFT, num_drafts=4
    ) as quire:
        [guessed] = await answers(quire, [request])
        counters = quire.engine.stats()
    assert guessed.token_ids == plain.token_ids
    assert counters.speculation.num_accepted == counters.speculation.num_drafted > 0
    assert counters.counters.num_steps < num_plain
