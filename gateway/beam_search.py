"""Beam search: which of the candidates go on, and which are results.

The rules are those of transformers' generate(num_beams=…), for one prompt, so that the
same model gives the same texts and scores.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from gateway.ports import TokenLogprob
from gateway.types import BeamOptions, EarlyStopping, FinishReason


class Branch(NamedTuple):
    """A running beam: the one of index `parent` before, and one more token."""

    parent: int
    token_id: int
    score: float  # sum of log-probabilities


class Hypothesis(NamedTuple):
    """A result. Its score is the sum of log-probabilities by length ** length_penalty."""

    token_ids: list[int]
    score: float
    reason: FinishReason


class _Beam(NamedTuple):
    token_ids: list[int]
    score: float


class BeamSearch:
    """The search for one prompt. Running beams are best first.

    A step's candidates are the likeliest continuations of each running beam. Of all of
    them the best `num_candidates` count; those among the first `num_beams` that end are
    results, of which the best `num_beams` are kept, and the best others run on.
    """

    def __init__(self, options: BeamOptions, stop_ids: Collection[int], max_generated: int) -> None:
        self._options = options
        self._stop_ids = frozenset(stop_ids)
        self._max_generated = max_generated
        self._running = [_Beam([], 0.0)]
        self._results: list[Hypothesis] = []
        self.is_done = False

    @property
    def num_candidates(self) -> int:
        """How many must be known of each beam: enough even if all stop tokens come first."""
        return max(2, 1 + len(self._stop_ids)) * self._options.num_beams

    def results(self) -> list[Hypothesis]:
        """The best first, at most `num_beams`."""
        return list(self._results)

    def advance(self, candidates: Sequence[Sequence[TokenLogprob]]) -> list[Branch]:
        """Take in the candidates of each running beam. Returns those that run now.

        None when the search is done.
        """
        num_beams = self._options.num_beams
        best = self._best(candidates)
        length = len(self._running[0].token_ids) + 1
        branches: list[Branch] = []
        for rank, branch in enumerate(best):
            reason = self._reason(branch.token_id, length)
            if reason is None:
                branches.append(branch)
            elif rank < num_beams:
                tokens = [*self._running[branch.parent].token_ids, branch.token_id]
                score = branch.score / length**self._options.length_penalty
                self._results.append(Hypothesis(tokens, score, reason))
        # A stable sort: of equal results the earlier one stays, as in transformers.
        self._results.sort(key=lambda result: -result.score)
        del self._results[num_beams:]
        del branches[num_beams:]
        self._running = [
            _Beam([*self._running[b.parent].token_ids, b.token_id], b.score) for b in branches
        ]
        self.is_done = not branches or not self._may_improve(length)
        return [] if self.is_done else branches

    def _best(self, candidates: Sequence[Sequence[TokenLogprob]]) -> list[Branch]:
        every = [
            Branch(parent, token.token_id, beam.score + token.logprob)
            for parent, (beam, tokens) in enumerate(zip(self._running, candidates, strict=True))
            for token in tokens
        ]
        every.sort(key=lambda branch: (-branch.score, branch.parent, branch.token_id))
        return every[: self.num_candidates]

    def _reason(self, token_id: int, length: int) -> FinishReason | None:
        if token_id in self._stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self._max_generated else None

    def _may_improve(self, length: int) -> bool:
        """Whether a running beam may still become one of the results."""
        options = self._options
        if len(self._results) < options.num_beams:
            return True
        if options.early_stopping is EarlyStopping.YES:
            return False
        if options.early_stopping is EarlyStopping.NEVER and options.length_penalty > 0:
            length = self._max_generated
        best_possible = self._running[0].score / length**options.length_penalty
        return bool(best_possible > self._results[-1].score)
