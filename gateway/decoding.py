"""What a step's tokens make of a group: texts that grow, end, or branch."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from gateway.group import SequenceGroup
from gateway.ports import Candidates, PromptLogprobs, SampledToken
from gateway.sequence import Sequence
from gateway.types import FinishReason


@dataclass(frozen=True, slots=True)
class Emission:
    """News of one continuation: its next tokens, and how it ended if it has.

    `stop`: the stop token that the client named. `score` is that of a beam search.
    """

    group: SequenceGroup
    index: int = 0
    tokens: Items[SampledToken] = ()
    finish: FinishReason | None = None
    stop: int | None = None
    score: float | None = None
    prompt: PromptLogprobs | None = None  # if it is news of the prompt instead


class Fork(NamedTuple):
    """A new sequence with the first `length` tokens of another and their blocks."""

    child: Sequence
    source: Sequence
    length: int


class Advance(NamedTuple):
    """`ended` are to be given up; `forks` to be made, before that."""

    emissions: list[Emission]
    ended: list[Sequence]
    forks: list[Fork]


def append(sequence: Sequence, drawn: Items[SampledToken]) -> Advance:
    """A sequence got tokens: one, or several if guesses were right."""
    group = sequence.group
    finish, stop = None, None
    tokens: list[SampledToken] = []
    for token in drawn:
        sequence.token_ids.append(token.token_id)
        tokens.append(token)
        if token.token_id in group.stop_ids:
            finish = FinishReason.STOP
            if token.token_id in group.request.sampling.stop_token_ids:
                stop = token.token_id
        elif len(sequence.token_ids) >= group.max_length:
            finish = FinishReason.LENGTH
        if finish:
            break
    sequence.num_known = len(sequence.token_ids)
    emission = Emission(group, sequence.index, tokens, finish, stop)
    forks = [] if group.has_spread else _spread(group)
    return Advance([emission], [sequence] if finish else [], forks)


def _spread(group: SequenceGroup) -> list[Fork]:
    """The leader has computed the prompt: the other samples share it.

    All but the prompt's last token, which each computes for itself to draw its own first.
    """
    [leader] = group.sequences
    group.has_spread = True
    prompt = group.request.prompt_ids
    return [
        Fork(group.new_sequence(index, list(prompt)), leader, len(prompt) - 1)
        for index in range(1, group.request.num_sequences)
    ]


def advance_beams(group: SequenceGroup, found: dict[str, Candidates]) -> Advance:
    """All beams of a group got their candidates."""
    beams, parents = group.beams, list(group.sequences)
    assert beams is not None
    group.has_spread = True
    branches = beams.advance([found[parent.id].tokens for parent in parents])
    if beams.is_done:
        emissions = [
            Emission(
                group,
                index,
                [SampledToken("", token_id) for token_id in result.token_ids],
                result.reason,
                _named_stop(group, result.token_ids),
                result.score,
            )
            for index, result in enumerate(beams.results()[: group.request.n])
        ]
        return Advance(emissions, parents, [])
    going_on: set[Sequence] = set()
    heirs: list[Sequence] = []
    forks: list[Fork] = []
    lengths = [len(parent.token_ids) for parent in parents]
    for branch in branches:
        parent, length = parents[branch.parent], lengths[branch.parent]
        if parent in going_on:
            child = group.new_sequence(0, [*parent.token_ids[:length], branch.token_id])
            forks.append(Fork(child, parent, length))
            heirs.append(child)
        else:
            going_on.add(parent)
            parent.token_ids.append(branch.token_id)
            heirs.append(parent)
    # The search speaks of its beams by their place.
    ended = [parent for parent in parents if parent not in going_on]
    group.sequences = heirs
    return Advance([], ended, forks)


def _named_stop(group: SequenceGroup, token_ids: list[int]) -> int | None:
    last = token_ids[-1]
    return last if last in group.request.sampling.stop_token_ids else None
