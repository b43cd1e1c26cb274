"""Draws the next tokens of the sequences of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from compute.errors import CannotDraw, LogitsNotFinite, NoTokenAllowed
from compute.sampling.drawing import draw
from compute.sampling.logprobs import likeliest, scored
from compute.sampling.sequence import SequenceSampler
from compute.types import TokenLogprob


class RowsToDraw(NamedTuple):
    """What is drawn for one sequence: the token after `known` and `sent`, from the row
    `first_row` of the logits, and as many more as there are right guesses, from the rows
    behind it. `guesses` are of the tokens at those places."""

    sampler: SequenceSampler
    first_row: int
    known: Sequence[int]
    sent: Sequence[int] = ()  # behind the known ones: the sampler does not know them yet
    guesses: Sequence[int] = ()

    @property
    def num_rows(self) -> int:
        return len(self.guesses) + 1


class ScoredToken(NamedTuple):
    token_id: int
    logprob: float | None = None
    top: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """Of one sequence: the tokens that were drawn, or its candidates, or why neither."""

    tokens: list[ScoredToken] = field(default_factory=list)
    candidates: list[TokenLogprob] = field(default_factory=list)
    failure: CannotDraw | None = None


@torch.inference_mode()
def sample(logits: torch.Tensor, wanted: Sequence[RowsToDraw]) -> list[Drawn]:
    """What is drawn for each sequence; samplers are as before, but for what they caught up.

    logits  [K, V]  any float type; read in fp32, left as they are

    Each row is drawn from as if it were alone. Log-probabilities are those of the
    unmodified softmax. Greedy rows take the largest score, the lowest id among equals.
    """
    if not wanted:
        return []
    logits = logits.float().cpu()
    greedy = logits.numpy().argmax(axis=-1)  # NaN counts as largest
    largest = logits.numpy()[np.arange(len(greedy)), greedy]
    rows = _Rows(logits, largest.tolist(), greedy.tolist())
    return [_drawn(rows, each) for each in wanted]


class _Rows(NamedTuple):
    """Logits [K, V], and the largest of each row with its id."""

    logits: torch.Tensor
    largest: list[float]
    greedy: list[int]


def _drawn(rows: _Rows, wanted: RowsToDraw) -> Drawn:
    sampler = wanted.sampler
    start = len(wanted.known) + len(wanted.sent)
    tokens: list[ScoredToken] = []
    pushed: list[int] = []

    def push(token_id: int) -> None:
        sampler.push(token_id)
        pushed.append(token_id)

    try:
        if not sampler.is_plain:
            sampler.catch_up(wanted.known)
            for token_id in wanted.sent:
                push(token_id)
        if sampler.options.num_candidates:
            return Drawn(candidates=_candidates(rows, wanted.first_row, sampler, start))
        for n in range(wanted.num_rows):
            row = wanted.first_row + n
            token_id = _token(rows, row, sampler, start + n)
            tokens.append(_with_logprobs(rows.logits[row], token_id, sampler))
            if n == len(wanted.guesses) or token_id != wanted.guesses[n]:
                break
            push(token_id)
    except CannotDraw as failure:
        # Behind a right guess it is as if that had been a step of its own: the next fails.
        if not tokens:
            return Drawn(failure=failure)
    finally:
        for token_id in reversed(pushed):
            sampler.pop(token_id)
    return Drawn(tokens)


def _token(rows: _Rows, row: int, sampler: SequenceSampler, position: int) -> int:
    """Raises CannotDraw."""
    largest = rows.largest[row]
    _check_finite(largest)
    is_greedy = sampler.options.temperature == 0.0
    if sampler.is_plain:
        if is_greedy:
            return rows.greedy[row]
        return draw(rows.logits[row], largest, sampler.options, position)
    scores = sampler.processed(rows.logits[row], position)
    best = int(scores.numpy().argmax())
    largest = float(scores[best])
    if largest == -math.inf:
        raise NoTokenAllowed("biases and masks leave no token to draw")
    return best if is_greedy else draw(scores, largest, sampler.options, position)


def _candidates(
    rows: _Rows, row: int, sampler: SequenceSampler, position: int
) -> list[TokenLogprob]:
    """Raises CannotDraw."""
    _check_finite(rows.largest[row])
    scores = torch.log_softmax(rows.logits[row], dim=0)
    if not sampler.is_plain:
        scores = sampler.processed(scores, position)
    found = likeliest(scores, sampler.options.num_candidates)
    if not found:
        raise NoTokenAllowed("biases and masks leave no candidate")
    return found


def _with_logprobs(logits: torch.Tensor, token_id: int, sampler: SequenceSampler) -> ScoredToken:
    if not sampler.options.return_logprob:
        return ScoredToken(token_id)
    return ScoredToken(token_id, *scored(logits, token_id, sampler.options.num_top_logprobs))


def _check_finite(largest: float) -> None:
    if not math.isfinite(largest):
        raise LogitsNotFinite("the logits are not finite: broken weights or pool")
