"""What follows from a text's own past, and when it pays to guess with it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.group import SequenceGroup
from gateway.ports import ModelInfo, PoolInfo
from gateway.speculation import NgramIndex, SpeculationMethod, Speculator
from gateway.types import GenerationRequest

NUM_DRAFTS = 4
REPEATING = [1, 2, 3, 4, 5, 6] * 8


def _followed(tokens: list[int], count: int) -> tuple[int, ...]:
    """By looking at every place in the text."""
    for size in range(min(4, len(tokens)), 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                return tuple(tokens[end : end + count])
    return ()


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 6), st.integers(1, 9))
def test_what_followed_the_last_time(tokens, count, pace):
    index = NgramIndex()
    for end in range(0, len(tokens) + 1, pace):
        index.follow(tokens[:end])
        assert index.propose(count) == _followed(tokens[:end], count)


def _speculator(method=SpeculationMethod.NGRAM) -> Speculator:
    speculator = Speculator(method, NUM_DRAFTS)
    speculator.attach(ModelInfo("tiny", b"", 1000, 2048, PoolInfo(16, 100, 1)))
    return speculator


def _sequence(name: str):
    group = SequenceGroup(GenerationRequest(name, REPEATING, 999), 2000, ())
    return group.sequences[0]


def _run(speculator, sequences, yields, num_steps, plain=1.0, each_guess=0.0, num_prompt_tokens=0):
    """Steps of `sequences`; how many of each had guesses.

    A sequence with guesses gets `yields` tokens, and a step takes `plain` seconds and
    `each_guess` for each sequence that has some.
    """
    counts = dict.fromkeys(sequences, 0)
    for _ in range(num_steps):
        guessing = [s for s in sequences if speculator.guess(s, NUM_DRAFTS)[1]]
        for sequence in guessing:
            counts[sequence] += 1
            speculator.learn(sequence, NUM_DRAFTS, yields[sequence])
        seconds = plain + each_guess * len(guessing)
        speculator.observe(len(sequences), len(guessing), num_prompt_tokens, seconds)
    return counts


def test_guesses_that_come_true_go_on():
    speculator, sequence = _speculator(), _sequence("a")
    counts = _run(speculator, [sequence], {sequence: 4}, 400, each_guess=0.5)
    assert counts[sequence] > 350
    assert speculator.stats().num_accepted == 3 * counts[sequence]


def test_guesses_that_fail_are_hardly_made():
    speculator, sequence = _speculator(), _sequence("a")
    counts = _run(speculator, [sequence], {sequence: 1}, 1000, each_guess=0.1)
    assert 0 < counts[sequence] < 100


def test_guesses_that_cost_more_than_they_yield_end():
    speculator, sequence = _speculator(), _sequence("a")
    _run(speculator, [sequence], {sequence: 2}, 300, each_guess=2.5)
    counts = _run(speculator, [sequence], {sequence: 2}, 640, each_guess=2.5)
    assert counts[sequence] < 40


def test_one_that_guesses_pays_for_all_that_it_holds_up():
    """Of 32 sequences one guesses: it gains a token, and takes a tenth of everybody's step.

    Shared out evenly that tenth looks like nothing to each; it is 3.2 tokens.
    """
    speculator = _speculator()
    others = [_sequence(f"b{n}") for n in range(31)]
    for other in others:
        for _ in range(40):
            speculator.learn(other, NUM_DRAFTS, 1)
    guessing = _sequence("a")
    sequences, yields = [guessing, *others], dict.fromkeys([guessing, *others], 1)
    yields[guessing] = 2
    _run(speculator, sequences, yields, 400, each_guess=0.1)
    dear = _run(speculator, sequences, yields, 640, each_guess=0.1)
    assert dear[guessing] < 60
    _run(speculator, sequences, yields, 400, each_guess=0.01)
    cheap = _run(speculator, sequences, yields, 640, each_guess=0.01)
    assert cheap[guessing] > 500


def test_prompts_in_every_step_do_not_stop_guesses():
    speculator, sequence = _speculator(), _sequence("a")
    speculator._num_steps = 31
    counts = _run(speculator, [sequence], {sequence: 3}, 320, num_prompt_tokens=100)
    assert 300 <= counts[sequence] < 320


def test_a_draft_model_that_is_not_there_makes_no_guesses():
    speculator = _speculator(SpeculationMethod.DRAFT)
    assert not speculator.is_able
    assert speculator.guess(_sequence("a"), NUM_DRAFTS) == ((), 0)
