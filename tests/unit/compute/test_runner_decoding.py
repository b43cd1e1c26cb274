"""The step contract of decoding: guesses, candidates, scores and sent tokens."""

from __future__ import annotations

import pytest
import torch

from compute.errors import InvalidStep
from compute.types import Chunk, SamplingOptions, SequenceState, Step

PROMPT = [5, 17, 3, 88, 41, 2, 9, 60, 33, 7]  # ten tokens; three blocks of eight for each
GREEDY = SamplingOptions()
DRAWN = SamplingOptions(
    temperature=1.2, seed=11, repetition_penalty=1.3, frequency_penalty=0.5, min_p=0.01
)


@pytest.fixture
def model(make_model):
    return make_model()


@pytest.fixture
def runner(model, make_pool):
    runner = model.runner(make_pool(num_blocks=16, block_size=8))
    yield runner
    runner.close()


def _state(name="a", tokens=PROMPT, blocks=(4, 9, 2), sampling=GREEDY):
    return SequenceState(name, tokens, blocks, sampling, len(PROMPT))


def _ids(result):
    return [token.token_id for token in result.tokens]


def _one_at_a_time(runner, sampling, count):
    """The tokens that steps of one token draw; compute forgets the sequence behind it."""
    got = _ids(
        runner.run(
            Step(1, sequences=[_state("x", sampling=sampling)], chunks=[Chunk("x", 0, 10, True)])
        )
    )
    while len(got) < count:
        got += _ids(runner.run(Step(2, chunks=[Chunk("x", 9 + len(got), 1, True)])))
    runner.run(Step(3, closed=["x"]))
    return got


def _wrong(token_id):
    return (token_id + 1) % 97


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("num_right", range(4))
def test_guesses_are_kept_up_to_the_first_wrong_one(runner, sampling, num_right):
    expected = _one_at_a_time(runner, sampling, 6)
    guesses = [*expected[1 : 1 + num_right], *map(_wrong, expected[1 + num_right : 4])]
    first = Step(1, sequences=[_state(sampling=sampling)], chunks=[Chunk("a", 0, 10, True)])
    assert _ids(runner.run(first)) == expected[:1]
    result = runner.run(Step(2, chunks=[Chunk("a", 10, 4, True, guesses, 3)]))
    assert _ids(result) == expected[1 : 2 + num_right]
    # What follows draws from KV of the right tokens, and counts each of them once.
    after = Step(3, chunks=[Chunk("a", 11 + num_right, 1, True)])
    assert _ids(runner.run(after)) == expected[2 + num_right : 3 + num_right]


def test_guesses_of_some_sequences_do_not_touch_others(runner):
    expected = _one_at_a_time(runner, DRAWN, 4)
    states = [_state(name, blocks=b, sampling=DRAWN) for name, b in (("a", (4, 9)), ("b", (1, 2)))]
    chunks = [Chunk("a", 0, 10, True), Chunk("b", 0, 10, True)]
    runner.run(Step(1, sequences=states, chunks=chunks))
    guesses = [expected[1], _wrong(expected[2])]
    chunks = [Chunk("b", 10, 1, True), Chunk("a", 10, 3, True, guesses, 2)]
    result = runner.run(Step(2, chunks=chunks))
    assert [(token.sequence_id, token.token_id) for token in result.tokens] == [
        ("b", expected[1]),
        ("a", expected[1]),
        ("a", expected[2]),
    ]


def test_sent_tokens_are_appended(runner, model):
    """As a beam goes on: with a token that compute did not draw."""
    sampling = SamplingOptions(num_candidates=3)
    first = Step(1, sequences=[_state(sampling=sampling)], chunks=[Chunk("a", 0, 10, True)])
    [found] = runner.run(first).candidates
    expected = torch.log_softmax(model.logits(PROMPT)[-1], dim=0).topk(3)
    assert [token.token_id for token in found.tokens] == expected.indices.tolist()
    logprobs = torch.tensor([token.logprob for token in found.tokens])
    torch.testing.assert_close(logprobs, expected.values, atol=1e-4, rtol=1e-4)
    chosen = found.tokens[1].token_id
    [found] = runner.run(Step(2, chunks=[Chunk("a", 10, 1, True, [chosen])])).candidates
    expected = torch.log_softmax(model.logits([*PROMPT, chosen])[-1], dim=0).topk(3)
    assert [token.token_id for token in found.tokens] == expected.indices.tolist()


def test_the_prompt_is_scored_whatever_its_chunks(runner, model):
    sampling = SamplingOptions(return_prompt_logprobs=True, num_top_logprobs=2)
    expected = torch.log_softmax(model.logits(PROMPT), dim=-1)
    told = {}
    chunks = [(0, 1), (1, 5), (6, 4), (10, 1)]
    state = [_state(sampling=sampling)]
    for number, (start, size) in enumerate(chunks):
        step = Step(number, sequences=state, chunks=[Chunk("a", start, size, start + size >= 10)])
        state = []
        result = runner.run(step)
        assert len(result.tokens) == (start + size >= 10)
        for each in result.prompt_logprobs:
            told |= dict(enumerate(each.tokens, each.start))
    assert sorted(told) == list(range(1, 10))
    for position, token in told.items():
        row = expected[position - 1]
        assert token.token_id == PROMPT[position]
        assert token.logprob == pytest.approx(float(row[PROMPT[position]]), abs=1e-4)
        assert [each.token_id for each in token.top] == row.topk(2).indices.tolist()


def test_a_prompt_that_is_longer_than_a_slice_is_scored_whole(model, make_pool):
    runner = model.runner(make_pool(num_blocks=32, block_size=8))
    prompt = [(7 * n + 3) % 97 for n in range(150)]
    sampling = SamplingOptions(return_prompt_logprobs=True)
    state = SequenceState("a", prompt, list(range(19)), sampling, 150)
    step = Step(1, sequences=[state], chunks=[Chunk("a", 0, 150, True)])
    [told] = runner.run(step).prompt_logprobs
    rows = torch.log_softmax(model.logits(prompt), dim=-1)
    expected = rows[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    got = torch.tensor([token.logprob for token in told.tokens])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    runner.close()


def test_a_sequence_that_nothing_may_follow_fails_alone(runner):
    forbid_all = SamplingOptions(stop_token_ids=tuple(range(64)), min_tokens=1, grammar="x")
    states = [_state(), _state("b", blocks=[1, 3], sampling=forbid_all)]
    chunks = [Chunk("b", 0, 10, True), Chunk("a", 0, 10, True)]
    result = runner.run(Step(1, sequences=states, chunks=chunks))
    [failure] = result.failures
    assert (failure.sequence_id, failure.reason) == ("b", "GRAMMAR_FAILED")
    assert "tokenizer.json" in failure.message
    assert [token.sequence_id for token in result.tokens] == ["a"]


REFUSED = {
    "guesses beyond the limit": (Chunk("a", 10, 34, True, [1] * 33, 33), "33 guesses"),
    "as many guesses as tokens": (Chunk("a", 10, 2, True, [1, 1], 2), "2 guesses in a chunk of 2"),
    "guesses without a draw": (Chunk("a", 10, 3, False, [1, 1], 2), "does not sample"),
    "more guesses than were sent": (Chunk("a", 9, 3, True, [1], 2), "1 tokens were sent"),
    "guesses below zero": (Chunk("a", 10, 1, True, [], -1), "-1 guesses"),
    "no draft model": (Chunk("a", 10, 3, True, [], 2), "no draft model"),
    "a token that is none": (Chunk("a", 10, 2, True, [97], 1), "outside"),
    "guesses beyond the blocks": (Chunk("a", 10, 15, True, [1] * 14, 14), "room for 24"),
    "guesses and candidates": (Chunk("c", 10, 2, True, [1], 1), "candidates"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradictory_chunks_are_refused_and_change_nothing(runner, name):
    expected = _one_at_a_time(runner, GREEDY, 2)
    candidates = SamplingOptions(num_candidates=2)
    states = [_state(), _state("c", [*PROMPT, 1], (1, 3), candidates)]
    runner.run(Step(1, sequences=states, chunks=[Chunk("a", 0, 10, True)]))
    chunk, problem = REFUSED[name]
    with pytest.raises(InvalidStep, match=problem):
        runner.run(Step(2, chunks=[chunk]))
    assert _ids(runner.run(Step(3, chunks=[Chunk("a", 10, 1, True)]))) == expected[1:]


@pytest.mark.parametrize("count", [-1, 11])
def test_a_prompt_that_is_longer_than_its_sequence_is_refused(runner, count):
    state = SequenceState("a", PROMPT, [4, 9], GREEDY, count)
    with pytest.raises(InvalidStep, match="of them in the prompt"):
        runner.run(Step(1, sequences=[state]))
