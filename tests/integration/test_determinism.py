"""The same request gives the same answer, token for token and bit for bit, however it is run."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher

from gateway.ports import SamplingOptions
from gateway.speculation import SpeculationMethod
from gateway.types import BeamOptions, GenerationRequest
from tests.integration.local import EOS, answers, make_tiny, prompts, started

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny(directory)
    return directory


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """Close enough to the model to be right at times: the same one with one layer."""
    directory = tmp_path_factory.mktemp("draft")
    make_tiny(directory, num_hidden_layers=1)
    return directory


def _requests() -> list[GenerationRequest]:
    """Of every kind whose state must travel with the sequence."""
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
    kinds = [
        {"sampling": {"seed": 0}},
        {"sampling": {"temperature": 0.8, "seed": 1, "frequency_penalty": 1.0}},
        {"sampling": {"temperature": 1.2, "seed": 2, "repetition_penalty": 1.3, "min_p": 0.01}},
        {"sampling": {"temperature": 1.0, "seed": 3, "top_p": 0.9, "presence_penalty": 0.5}},
        {"sampling": {"temperature": 0.9, "seed": 4, "typical_p": 0.8, "min_tokens": 30}},
        {"sampling": {"temperature": 1.0, "seed": 5}, "n": 3},
        {"sampling": {"temperature": 1.0, "seed": 6, "top_k": 20}, "n": 2, "best_of": 4},
        {"sampling": {"temperature": 0.7, "seed": 7, "grammar": grammar}},
        {"beams": BeamOptions(3), "n": 3},
        {"sampling": {"temperature": 0.0, "repetition_penalty": 1.5, "num_top_logprobs": 2}},
    ]
    made = []
    for n, (kind, prompt) in enumerate(zip(kinds, prompts(len(kinds), 30, shared=17), strict=True)):
        options = {"return_logprob": "beams" not in kind, **kind.get("sampling", {})}
        made.append(
            GenerationRequest(
                request_id=str(n),
                prompt_ids=prompt,
                max_tokens=48,
                sampling=SamplingOptions(**options),
                n=kind.get("n", 1),
                best_of=kind.get("best_of"),
                beams=kind.get("beams"),
            )
        )
    return made


async def _alone(model, **settings):
    """Each request by itself, one after the other."""
    got = []
    async with started(model, **settings) as quire:
        for request in _requests():
            got += await answers(quire, [request])
    return [each.what_counts() for each in got]


async def _together(model, **settings):
    async with started(model, **settings) as quire:
        got = await answers(quire, _requests())
        return [each.what_counts() for each in got], quire.engine.stats()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_alone_batched_chunked_swapped_recomputed_and_guessed(tiny, draft, dtype):
    expected = await _alone(tiny, dtype=dtype)
    lengths = [len(ids) for answer in expected for ids in answer[1].values()]
    assert max(lengths) == 48
    together, stats = await _together(tiny, dtype=dtype)
    assert together == expected
    assert stats.preemptions.num_groups == 0

    chunked, _ = await _together(tiny, dtype=dtype, token_budget=16, max_running=16)
    assert chunked == expected

    small = {"dtype": dtype, "num_blocks": 42, "watermark": 0.0}
    swapped, stats = await _together(tiny, num_host_blocks=200, **small)
    assert stats.preemptions.num_swapped > 0
    assert swapped == expected

    recomputed, stats = await _together(tiny, **small)
    assert stats.preemptions.num_recomputed > 0
    assert stats.preemptions.num_swapped == 0
    assert recomputed == expected

    ngram, stats = await _together(tiny, dtype=dtype, speculation=SpeculationMethod.NGRAM)
    assert stats.speculation.num_drafted > 0
    assert ngram == expected

    drafted, stats = await _together(
        tiny, dtype=dtype, draft=draft, speculation=SpeculationMethod.DRAFT
    )
    assert 0 < stats.speculation.num_accepted < stats.speculation.num_drafted
    assert drafted == expected


async def test_a_structured_answer_survives_preemptions(tiny):
    """Its JSON is whole, and the one that it is without them."""
    async with started(tiny) as quire:
        [expected] = await answers(quire, [_requests()[7]])
    value = json.loads(expected.texts[0])
    assert set(value) == {"a", "b"}
    crowd = [
        GenerationRequest(
            request_id=f"crowd-{n}",
            prompt_ids=prompt,
            max_tokens=60,
            sampling=SamplingOptions(temperature=1.0, seed=n),
            ignore_eos=True,
        )
        for n, prompt in enumerate(prompts(6))
    ]
    for num_host_blocks in (0, 100):
        async with started(tiny, num_blocks=20, num_host_blocks=num_host_blocks) as quire:
            # Last in the queue, it is the first to be suspended.
            *_, got = await answers(quire, [*crowd, _requests()[7]])
            assert quire.engine.stats().preemptions.num_resumed > 0
        assert got.what_counts() == expected.what_counts()


async def test_a_stop_token_ends_an_answer_wherever_guesses_reach(tiny):
    request = _requests()[1]
    async with started(tiny) as quire:
        [free] = await answers(quire, [request])
    tokens = free.token_ids[0]
    stop = next(t for n, t in enumerate(tokens) if n > 10 and t not in tokens[:n] and t != EOS)
    sampling = SamplingOptions(
        temperature=0.8, seed=1, frequency_penalty=1.0, stop_token_ids=(stop,)
    )
    stopped = GenerationRequest("x", request.prompt_ids, 48, sampling)
    for method in SpeculationMethod.OFF, SpeculationMethod.NGRAM:
        async with started(tiny, speculation=method) as quire:
            [got] = await answers(quire, [stopped])
        assert got.ends[0].stop == stop
        assert got.token_ids[0][: tokens.index(stop)] == tokens[: tokens.index(stop)]
        assert got.ends[0].num_completion_tokens <= tokens.index(stop) + 1
