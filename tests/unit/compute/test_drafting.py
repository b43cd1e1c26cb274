"""A draft model in the same blocks: it changes no token, and right guesses save steps."""

from __future__ import annotations

import math

import pytest
import torch

from compute.drafting import draft_layers, widened
from compute.errors import ModelUnsupported
from compute.kernels.cpu import CpuKernels
from compute.runner import StepRunner
from compute.types import BlockCopy, Chunk, KvShape, SamplingOptions, SequenceState, Step

PROMPT = [5, 17, 3, 88, 41, 2, 9, 60, 33, 7]
GREEDY = SamplingOptions()
DRAWN = SamplingOptions(temperature=0.9, seed=5, frequency_penalty=0.3, top_p=0.95)


@pytest.fixture
def models(make_model):
    """The model; one with other weights and another shape; the kernels of both."""
    target = make_model(kernels=CpuKernels())
    draft = make_model(
        kernels=CpuKernels(),
        hidden_size=32,
        num_hidden_layers=3,
        num_key_value_heads=1,
        head_dim=8,
    )
    return target, draft


def _runner(target, draft, pool) -> StepRunner:
    return StepRunner(
        target.decoder,
        target.kernels,
        pool,
        model_id="tiny",
        fingerprint=b"\0" * 32,
        draft=draft.decoder if draft else None,
    )


def _generate(runner, sampling, count, num_drafts, name="a", blocks=(4, 9, 2, 7, 11)):
    """The tokens, and how many steps drew them."""
    state = SequenceState(name, PROMPT, blocks, sampling, len(PROMPT))
    result = runner.run(Step(1, sequences=[state], chunks=[Chunk(name, 0, 10, True)]))
    got = [token.token_id for token in result.tokens]
    num_steps = 1
    while len(got) < count:
        start = len(PROMPT) + len(got) - 1
        drafts = min(num_drafts, count - len(got) - 1)
        chunk = Chunk(name, start, 1 + drafts, True, (), drafts)
        got += [token.token_id for token in runner.run(Step(2, chunks=[chunk])).tokens]
        num_steps += 1
    return got, num_steps


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("num_drafts", [1, 4])
def test_another_models_guesses_change_no_token(models, make_pool, sampling, num_drafts):
    target, draft = models
    alone = _runner(target, None, make_pool(block_size=8))
    expected, _ = _generate(alone, sampling, 24, 0)
    runner = _runner(target, draft, make_pool(block_size=8))
    got, _ = _generate(runner, sampling, 24, num_drafts)
    assert got == expected


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_the_model_as_its_own_draft_is_always_right(models, make_pool, sampling):
    """It sees its KV in the blocks at every position, whichever step computed it."""
    target, _ = models
    runner = _runner(target, target, make_pool(block_size=8))
    expected, _ = _generate(_runner(target, None, make_pool(block_size=8)), sampling, 25, 0)
    got, num_steps = _generate(runner, sampling, 25, 3)
    assert got == expected
    assert num_steps == 1 + math.ceil(24 / 4)


def test_guesses_go_on_after_a_copy_of_the_blocks(models, make_pool):
    """A fork's tail is copied; its draft KV with it."""
    target, _ = models
    runner = _runner(target, target, make_pool(block_size=8))
    expected, _ = _generate(runner, DRAWN, 13, 3)
    fork = SequenceState("b", PROMPT + expected[:3], (4, 12, 13, 14), DRAWN, len(PROMPT))
    runner.run(Step(9, sequences=[fork], copies=[BlockCopy(9, 12)]))
    got = []
    for _ in range(2):
        chunk = Chunk("b", 12 + len(got), 5, True, (), 4)
        got += [token.token_id for token in runner.run(Step(10, chunks=[chunk])).tokens]
    assert got == expected[3:]


def test_sequences_with_and_without_guesses_share_a_step(models, make_pool):
    target, draft = models
    runner = _runner(target, draft, make_pool(block_size=8))
    expected, _ = _generate(runner, DRAWN, 6, 0, "x")
    states = [
        SequenceState(name, PROMPT, blocks, DRAWN, len(PROMPT))
        for name, blocks in (("a", (1, 2, 3)), ("b", (5, 6, 8)))
    ]
    chunks = [Chunk("a", 0, 10, True), Chunk("b", 0, 10, True)]
    runner.run(Step(1, sequences=states, chunks=chunks))
    chunks = [Chunk("b", 10, 1, True), Chunk("a", 10, 4, True, (), 3)]
    tokens = runner.run(Step(2, chunks=chunks)).tokens
    assert [t.token_id for t in tokens if t.sequence_id == "b"] == expected[1:2]
    of_a = [t.token_id for t in tokens if t.sequence_id == "a"]
    assert of_a == expected[1 : 1 + len(of_a)]
    assert of_a


def test_the_draft_has_layers_of_its_own_in_every_block():
    shape, draft = KvShape(2, 3, 16, "float32"), KvShape(3, 1, 8, "float32")
    wide = widened(shape, draft)
    assert wide == KvShape(3, 3, 16, "float32")  # 24 of 48 values of a layer's token
    pool = torch.zeros(5, wide.num_layers, 2, 8, 3, 16)
    layers = draft_layers(pool, 2, draft)
    assert [layer.shape for layer in layers] == [(5, 2, 8, 1, 8)] * 3
    for n, layer in enumerate(layers, 1):
        layer += n
    assert (pool[:, :2] == 0).all()
    assert [int((pool == n).sum()) for n in (1, 2, 3)] == [5 * 2 * 8 * 8] * 3


def test_a_draft_that_does_not_fit_is_refused(make_model, make_pool):
    target = make_model()
    with pytest.raises(ModelUnsupported, match="98 tokens, the model 97"):
        _runner(target, make_model(vocab_size=98), make_pool())
    with pytest.raises(ModelUnsupported, match="takes 128 tokens, the model 256"):
        _runner(target, make_model(max_position_embeddings=128), make_pool())
