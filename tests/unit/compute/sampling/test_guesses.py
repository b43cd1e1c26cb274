"""Guesses: whatever they are, the tokens are those drawn one at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compute.sampling import RowsToDraw, SequenceSampler, sample
from compute.types import SamplingOptions
from tests.unit.compute.sampling.rows import make_logits


def _logits_after(tokens) -> torch.Tensor:
    """A model: logits that depend on all tokens before."""
    return make_logits(12, seed=hash(tuple(tokens)) % 2**31, spread=1.5)


@settings(deadline=None)
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


OPTIONS = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 4]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    typical_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.8]),
    frequency_penalty=st.sampled_from([0.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, -0.7]),
    logit_bias=st.sampled_from([(), ((2, 3.0), (5, -100.0))]),
    min_tokens=st.sampled_from([0, 4]),
    stop_token_ids=st.just((1, 6)),
    seed=st.integers(0, 2**64 - 1),
    sequence_index=st.integers(0, 3),
    return_logprob=st.booleans(),
    num_top_logprobs=st.sampled_from([0, 3]),
)


def _one_at_a_time(options, prompt, count):
    sampler, tokens, drawn = SequenceSampler(options, len(prompt)), list(prompt), []
    while len(drawn) < count:
        [each] = sample(_logits_after(tokens)[None], [RowsToDraw(sampler, 0, tokens)])
        drawn += each.tokens
        tokens.append(each.tokens[0].token_id)
    return drawn


@settings(max_examples=200, deadline=None)
@given(
    OPTIONS,
    st.lists(st.integers(0, 11), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 11), st.booleans()), max_size=6),
    st.integers(0, 2),
)
def test_steps_with_guesses_make_the_text_that_steps_without_make(options, prompt, plan, num_sent):
    """Steps of any number of guesses, some of them right, on one sampler; other rows beside."""
    expected = _one_at_a_time(options, prompt, 30)
    right = [token.token_id for token in expected]
    sampler, got = SequenceSampler(options, len(prompt)), []
    for num_guesses, wrong, is_wrong in plan:
        guesses = right[len(got) : len(got) + num_guesses]
        if guesses and is_wrong:
            guesses[-1] = wrong
        tokens = [*prompt, *(token.token_id for token in got)]
        rows = [_logits_after([*tokens, *guesses[:n]]) for n in range(len(guesses) + 1)]
        # The last tokens may come with the step, as if another had drawn them.
        cut = max(len(prompt), len(tokens) - num_sent)
        wanted = RowsToDraw(sampler, 1, tokens[:cut], tokens[cut:], guesses)
        beside = RowsToDraw(SequenceSampler(SamplingOptions()), 0, [0])
        _, drawn = sample(torch.stack([make_logits(12), *rows]), [beside, wanted])
        assert drawn.failure is None
        got += drawn.tokens
    assert got == expected[: len(got)]
    assert len(got) >= len(plan)


def test_right_guesses_stand_although_a_row_behind_them_is_broken():
    """The next step meets that row alone, and fails."""
    rows = torch.stack([make_logits(12, seed=n) for n in range(4)])
    right = rows.argmax(dim=-1).tolist()
    for options in (SamplingOptions(), SamplingOptions(presence_penalty=1e-6)):
        for place in range(4):
            broken = rows.clone()
            broken[place, 3] = math.nan
            [drawn] = sample(
                broken, [RowsToDraw(SequenceSampler(options, 1), 0, [5], guesses=right[:3])]
            )
            assert [token.token_id for token in drawn.tokens] == right[:place]
            assert (drawn.failure is not None) is (place == 0)


def test_rows_behind_the_first_wrong_guess_are_not_looked_at():
    rows = torch.stack([make_logits(12, seed=n) for n in range(3)])
    rows[1:] = math.nan
    best = int(rows[0].argmax())
    wanted = RowsToDraw(SequenceSampler(SamplingOptions()), 0, [5], guesses=[(best + 1) % 12, 0])
    [drawn] = sample(rows, [wanted])
    assert [token.token_id for token in drawn.tokens] == [best]


@pytest.mark.parametrize("num_guesses", [0, 1, 5])
def test_all_right_guesses_give_one_token_more(num_guesses):
    rows = torch.stack([make_logits(12, seed=n) for n in range(num_guesses + 1)])
    right = rows.argmax(dim=-1).tolist()
    wanted = RowsToDraw(SequenceSampler(SamplingOptions()), 0, [5], guesses=right[:-1])
    assert wanted.num_rows == num_guesses + 1
    [drawn] = sample(rows, [wanted])
    assert [token.token_id for token in drawn.tokens] == right
