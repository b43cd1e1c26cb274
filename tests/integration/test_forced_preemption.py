"""Sequences that are suspended at a given token go on as if nothing had happened."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher

from gateway.ports import SamplingOptions
from gateway.types import BeamOptions, GenerationRequest
from tests.integration.local import answers, make_tiny, prompts, started

NESTED = {
    "type": "object",
    "properties": {
        "a": {
            "type": "object",
            "properties": {"b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
            "required": ["b"],
            "additionalProperties": False,
        }
    },
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny(directory)
    return directory


def _suspend_at(quire, num_tokens) -> set:
    """Suspend each group, once, when its first sequence has so many tokens; those it was."""
    scheduler, suspended = quire.engine._scheduler, set()
    make_room = scheduler._make_room

    def forced():
        make_room()
        for group in list(scheduler._running):
            counts = [sequence.num_generated for sequence in group.sequences]
            is_due = group not in suspended and counts[:1] == [num_tokens]
            if is_due and not (scheduler._next.forks or scheduler._forking):
                suspended.add(group)
                scheduler._suspend(group)

    scheduler._make_room = forced
    return suspended


async def _assert_unmoved(tiny, request, num_tokens):
    async with started(tiny) as quire:
        [expected] = await answers(quire, [request])
    for num_host_blocks in (0, 200):
        async with started(tiny, num_host_blocks=num_host_blocks) as quire:
            if num_host_blocks:
                quire.manager.observe_prefill(1, 10.0)  # computing again is dear: it is swapped
            suspended = _suspend_at(quire, num_tokens)
            [got] = await answers(quire, [request])
            assert len(suspended) == 1
            preempted = quire.engine.stats().preemptions
            assert bool(preempted.num_swapped) == bool(num_host_blocks)
        assert got.what_counts() == expected.what_counts()
    return expected


async def test_s6_seed_penalties_and_min_tokens_outlast_a_preemption(tiny):
    sampling = SamplingOptions(
        temperature=0.8, seed=1, frequency_penalty=1.0, min_tokens=12, return_logprob=True
    )
    [prompt] = prompts(1)
    answer = await _assert_unmoved(tiny, GenerationRequest("x", prompt, 30, sampling), 7)
    assert len(answer.token_ids[0]) >= 12


async def test_a7_nested_json_outlasts_a_preemption(tiny):
    grammar = LLMatcher.grammar_from_json_schema(
        json.dumps(NESTED), overrides={"whitespace_flexible": False}
    )
    sampling = SamplingOptions(temperature=1.0, seed=3, grammar=grammar)
    [prompt] = prompts(1)
    answer = await _assert_unmoved(tiny, GenerationRequest("x", prompt, 80, sampling), 3)
    assert set(json.loads(answer.texts[0])["a"]) == {"b"}


@pytest.mark.parametrize("num_tokens", [2, 3, 9])
async def test_samples_and_beams_outlast_a_preemption(tiny, num_tokens):
    [prompt] = prompts(1, 29)
    sampling = SamplingOptions(temperature=1.0, seed=5)
    await _assert_unmoved(
        tiny, GenerationRequest("n", prompt, 20, sampling, n=3, ignore_eos=True), num_tokens
    )
    beams = GenerationRequest("b", prompt, 20, beams=BeamOptions(3), n=3, ignore_eos=True)
    await _assert_unmoved(tiny, beams, num_tokens)
