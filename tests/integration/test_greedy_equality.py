"""The real model over pages gives the tokens and log-probabilities that transformers gives.

The oracle is teacher-forced: one forward over prompt and answer gives its logits at every
position of our answer, which is cheap and needs no cache of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from compute.fakes import PrivatePool, SimpleDriver
from compute.kernels.cpu import CpuKernels
from compute.loading import load_model
from compute.runner import StepRunner
from compute.types import SamplingOptions
from tests.integration.oracle import load_oracle

pytestmark = pytest.mark.timeout(1200)  # about two minutes on two idle cores

NUM_TOKENS = 48
NEAR_TIE = 1e-3  # top two logits closer than this may swap: fp32 sums in another order
LOGPROB_TOLERANCE = 1e-3
NUM_POOL_TOKENS = 12_288
SYSTEM = "You are a patient teacher. Answer in short, plain sentences and give one example."


@pytest.fixture(scope="module")
def prompts(model_files) -> dict[str, list[int]]:
    """49 prompts by name, as token ids."""
    texts = json.loads(Path(__file__).with_name("greedy_prompts.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(model_files.directory)
    result = {}
    for kind, entries in texts.items():
        for n, text in enumerate(entries):
            if kind == "chat":
                messages = [
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": text},
                ]
                text = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False
                )
            result[f"{kind} {n}"] = tokenizer(text)["input_ids"]
    return result


class Oracle:
    """transformers' forward with the weights that transformers itself reads."""

    def __init__(self, model_files) -> None:
        self._model = load_oracle(model_files)

    def judge(self, name: str, prompt: list[int], generated) -> int:
        """Check one answer; return how many near ties fell the other way."""
        answer = generated.token_ids
        assert len(answer) == NUM_TOKENS
        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt + answer[:-1]])).logits[0]
        logits = logits[len(prompt) - 1 :]
        top = torch.topk(logits, 2)
        expected = torch.log_softmax(logits, dim=-1)
        num_swapped = 0
        for n, token_id in enumerate(answer):
            if token_id != int(top.indices[n, 0]):
                gap = float(top.values[n, 0] - top.values[n, 1])
                assert token_id == int(top.indices[n, 1]), f"{name}, token {n}"
                assert gap < NEAR_TIE, f"{name}, token {n}: top logits {gap} apart"
                num_swapped += 1
            difference = abs(float(expected[n, token_id]) - generated.logprobs[n])
            assert difference < LOGPROB_TOLERANCE, f"{name}, token {n}: {difference}"
        return num_swapped


@pytest.fixture(scope="module")
def oracle(model_files) -> Oracle:
    return Oracle(model_files)


@pytest.fixture(scope="module")
def loaded(model_files):
    kernels = CpuKernels()
    model = load_model(model_files.directory, model_files.weights, "float32", kernels)
    return model, kernels


@pytest.fixture
def make_runner(loaded):
    """make_runner(block_size) -> StepRunner over a pool of its own, closed after the test."""
    model, kernels = loaded
    open_things = []

    def make(block_size: int) -> StepRunner:
        pool = PrivatePool(num_blocks=NUM_POOL_TOKENS // block_size, block_size=block_size)
        runner = StepRunner(
            model.decoder, kernels, pool, model_id="real", fingerprint=model.fingerprint
        )
        open_things.extend((runner, pool))
        return runner

    yield make
    for thing in open_things:
        thing.close()


@pytest.fixture(scope="module")
def reference(loaded, prompts, oracle):
    """Answers of one run, each of them judged by the oracle."""
    model, kernels = loaded
    with PrivatePool(num_blocks=NUM_POOL_TOKENS // 16, block_size=16) as pool:
        runner = StepRunner(
            model.decoder, kernels, pool, model_id="real", fingerprint=model.fingerprint
        )
        answers = _generate(SimpleDriver(runner, token_budget=512), prompts)
        runner.close()
    for name, prompt in prompts.items():
        oracle.judge(name, prompt, answers[name])
    return answers


def _generate(driver, prompts):
    greedy = dict.fromkeys(prompts, SamplingOptions(return_logprob=True))
    return driver.generate(prompts, NUM_TOKENS, greedy)


def _check_same(answers, reference, prompts):
    """To the last bit, however they were computed."""
    for name in prompts:
        assert answers[name].token_ids == reference[name].token_ids, name
        assert answers[name].logprobs == reference[name].logprobs, name


def test_answers_equal_the_oracles(reference, prompts):
    assert len(prompts) >= 40
    assert reference.keys() == prompts.keys()


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_chunks_block_sizes_and_warm_prefixes_change_no_answer(
    block_size, make_runner, prompts, reference
):
    driver = SimpleDriver(
        make_runner(block_size), token_budget=88, share_prefixes=True, shuffle_seed=block_size
    )
    cold = _generate(driver, prompts)
    assert driver.num_cached_tokens == 0
    _check_same(cold, reference, prompts)
    warm = _generate(driver, prompts)
    expected = sum((len(prompt) - 1) // block_size * block_size for prompt in prompts.values())
    assert driver.num_cached_tokens == expected
    _check_same(warm, reference, prompts)


def test_a_prompt_alone_gets_the_answer_it_gets_in_company(make_runner, prompts, reference):
    driver = SimpleDriver(make_runner(16))
    for name in ("text 0", "code 0", "chat 0", "scripts 4", "emoji 1"):
        alone = {name: prompts[name]}
        _check_same(_generate(driver, alone), reference, alone)
