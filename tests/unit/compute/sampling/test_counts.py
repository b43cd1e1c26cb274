"""Counts of tokens, kept along the way, against counting from scratch."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compute.sampling import SequenceSampler
from compute.sampling.counts import TokenCounts
from compute.types import SamplingOptions
from tests.unit.compute.sampling.rows import make_logits

PENALTIES = SamplingOptions(
    temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4
)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 49151), max_size=40),
    st.lists(st.one_of(st.integers(0, 30), st.just("remove"), st.integers(0, 49151)), max_size=90),
)
def test_counts_are_those_of_a_list(prompt, events):
    counts, generated = TokenCounts(prompt), []
    for event in events:
        if event != "remove":
            counts.add(event)
            generated.append(event)
        elif generated:
            counts.remove(generated.pop())
        ids, numbers = counts.generated()
        assert dict(zip(ids.tolist(), numbers.tolist(), strict=True)) == Counter(generated)
        assert sorted(counts.met().tolist()) == sorted({*prompt, *generated})


def test_what_was_read_does_not_change_with_the_counts():
    counts = TokenCounts([4, 4, 2])
    counts.add(7)
    met, (ids, numbers) = counts.met(), counts.generated()
    for token in (7, 7, 9, 4):
        counts.add(token)
    assert met.tolist() == [2, 4, 7]
    assert (ids.tolist(), numbers.tolist()) == ([7], [1.0])


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 11), min_size=1, max_size=8),
    st.lists(st.one_of(st.integers(0, 11), st.just("pop"), st.just("known")), max_size=30),
)
def test_counts_kept_along_the_way_are_those_counted_from_scratch(prompt, events):
    """push, pop and catch_up in any order that a step could bring."""
    logits = make_logits(12)
    sampler = SequenceSampler(PENALTIES, len(prompt))
    known, trial = list(prompt), []
    sampler.catch_up(known)
    for event in events:
        if event == "known":
            while trial:
                sampler.pop(trial.pop())
            known.append((len(known) * 5) % 12)
            sampler.catch_up(known)
        elif event == "pop":
            if trial:
                sampler.pop(trial.pop())
        else:
            sampler.push(event)
            trial.append(event)
        fresh = SequenceSampler(PENALTIES, len(prompt))
        fresh.catch_up([*known, *trial])
        position = len(known) + len(trial)
        assert torch.equal(sampler.processed(logits, position), fresh.processed(logits, position))
