"""Answers of the whole system against transformers' generate() on the same weights."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from gateway.ports import SamplingOptions
from gateway.types import BeamOptions, EarlyStopping, FinishReason, GenerationRequest
from tests.integration.local import EOS, answers, make_tiny, prompts, started

STOPPING = {EarlyStopping.NO: False, EarlyStopping.YES: True, EarlyStopping.NEVER: "never"}
SHAPES = {
    "grouped heads": {},
    "one head each, tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "biases, wide heads": {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
}
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=SHAPES)
def tiny(request, tmp_path_factory):
    """A random model: its directory, and transformers' own."""
    directory = tmp_path_factory.mktemp("tiny")
    return directory, make_tiny(directory, seed=len(request.param), **SHAPES[request.param])


def _generate(model, prompt, **options):
    """transformers' answer, and all that it returns."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            return_dict_in_generate=True,
            output_scores=True,
            do_sample=False,
            **options,
        )
    rows = [row[len(prompt) :] for row in result.sequences.tolist()]
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows], result


def _request(name, prompt, sampling=None, **options):
    sampling = sampling or SamplingOptions()
    return GenerationRequest(name, prompt, NUM_TOKENS, sampling, **options)


PENALTIES = {
    "greedy": ({}, {}),
    "repetition": ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    "encouraged": ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
    "at least 20": ({"min_tokens": 20}, {"min_new_tokens": 20}),
    "biased": (
        {"logit_bias": ((7, 4.0), (9, -100.0))},
        {"sequence_bias": {(7,): 4.0, (9,): -100.0}},
    ),
}


@pytest.mark.parametrize("name", PENALTIES)
async def test_greedy_and_penalized_answers_are_transformers(tiny, name):
    directory, oracle = tiny
    ours, theirs = PENALTIES[name]
    asked = prompts(8)
    async with started(directory) as quire:
        sampling = SamplingOptions(**ours)
        got = await answers(quire, [_request(str(n), p, sampling) for n, p in enumerate(asked)])
    for answer, prompt in zip(got, asked, strict=True):
        [expected], _ = _generate(oracle, prompt, **theirs)
        assert answer.token_ids[0] == expected
        is_ended = expected[-1] == EOS
        assert answer.ends[0].reason is (FinishReason.STOP if is_ended else FinishReason.LENGTH)


async def test_frequency_and_presence_penalties_are_those_of_the_formula(tiny):
    directory, oracle = tiny
    sampling = SamplingOptions(frequency_penalty=0.6, presence_penalty=0.9)
    asked = prompts(4)
    async with started(directory) as quire:
        got = await answers(quire, [_request(str(n), p, sampling) for n, p in enumerate(asked)])
    for answer, prompt in zip(got, asked, strict=True):
        generated: list[int] = []
        while len(generated) < NUM_TOKENS and EOS not in generated:
            with torch.inference_mode():
                logits = oracle(torch.tensor([[*prompt, *generated]])).logits[0, -1].clone()
            logits = logits.clone()
            for token in set(generated):
                logits[token] -= 0.6 * generated.count(token) + 0.9
            generated.append(int(logits.argmax()))
        assert answer.token_ids[0] == generated


@pytest.mark.parametrize("early_stopping", list(EarlyStopping))
@pytest.mark.parametrize(("num_beams", "length_penalty"), [(2, 1.0), (4, -0.5), (5, 2.0)])
async def test_beam_searches_are_transformers(tiny, num_beams, length_penalty, early_stopping):
    directory, oracle = tiny
    asked = prompts(3)
    options = BeamOptions(num_beams, length_penalty, early_stopping)
    async with started(directory) as quire:
        got = await answers(
            quire,
            [_request(str(n), p, beams=options, n=num_beams) for n, p in enumerate(asked)],
        )
    for answer, prompt in zip(got, asked, strict=True):
        texts, result = _generate(
            oracle,
            prompt,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            length_penalty=length_penalty,
            early_stopping=STOPPING[early_stopping],
        )
        assert answer.tokens() == texts
        scores = [answer.ends[n].score for n in range(num_beams)]
        assert scores == pytest.approx(result.sequences_scores.tolist(), abs=1e-4)


async def test_a_penalized_beam_search_is_transformers(tiny):
    directory, oracle = tiny
    [prompt] = prompts(1)
    sampling = SamplingOptions(repetition_penalty=1.4)
    async with started(directory) as quire:
        request = _request("beams", prompt, sampling, beams=BeamOptions(4), n=2)
        [got] = await answers(quire, [request])
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4)])
    texts, result = _generate(
        oracle, prompt, num_beams=4, num_return_sequences=2, logits_processor=processors
    )
    assert got.tokens() == texts
    scores = [got.ends[n].score for n in range(2)]
    assert scores == pytest.approx(result.sequences_scores.tolist(), abs=1e-4)


async def test_log_probabilities_of_prompt_and_answer_are_transformers_once_and_again(tiny):
    """Prompt scores are computed, whatever is cached (fault C9)."""
    directory, oracle = tiny
    prompt = list(range(1, 34))
    sampling = SamplingOptions(return_logprob=True, return_prompt_logprobs=True, num_top_logprobs=3)
    async with started(directory) as quire:
        got = []
        for n in range(2):
            got += await answers(quire, [_request(str(n), prompt, sampling)])
    first, second = got
    assert first.what_counts() == second.what_counts()
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*prompt, *first.token_ids[0]]])).logits[0]
    expected = torch.log_softmax(logits, dim=-1)
    told = [*first.prompt, *first.logprobs[0]]
    tokens = [*prompt, *first.token_ids[0]]
    assert [token.token_id for token in told] == tokens[1:]
    for position, token in enumerate(told):
        assert token.logprob == pytest.approx(float(expected[position, token.token_id]), abs=1e-4)
        best = expected[position].topk(3)
        assert [top.token_id for top in token.top] == best.indices.tolist()
        assert [top.logprob for top in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.timeout(900)
async def test_the_real_model_beams_and_penalties_are_transformers(model_files, real_oracle):
    tokenizer, oracle = real_oracle
    texts = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a forest,"]
    asked = [tokenizer(text)["input_ids"] for text in texts]
    requests, expected = [], []
    for n, prompt in enumerate(asked):
        penalized = SamplingOptions(repetition_penalty=1.2)
        requests.append(_request(f"penalized-{n}", prompt, penalized))
        expected.append(_generate(oracle, prompt, repetition_penalty=1.2)[0])
        requests.append(_request(f"beams-{n}", prompt, beams=BeamOptions(3), n=3))
        expected.append(_generate(oracle, prompt, num_beams=3, num_return_sequences=3)[0])
    async with started(
        model_files.directory if model_files.weights.is_dir() else model_files.weights,
        num_blocks=200,
        bytes_per_block=8 * 2 * 30 * 3 * 64 * 4,
    ) as quire:
        got = await answers(quire, requests)
    for request, answer, texts in zip(requests, got, expected, strict=True):
        end = 2  # <|im_end|>, which transformers' rows are cut after
        rows = [row[: row.index(end) + 1] if end in row else row for row in texts]
        assert answer.tokens() == rows, request.request_id


@pytest.fixture(scope="module")
def real_oracle(model_files):
    from transformers import AutoTokenizer

    from tests.integration.oracle import load_oracle

    return AutoTokenizer.from_pretrained(model_files.directory), load_oracle(model_files)
