"""What a step gave, gathered in the order of its chunks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from compute.errors import CannotDraw, LogitsNotFinite
from compute.sampling import Drawn, scored
from compute.sequences import PlannedChunk
from compute.types import (
    Candidates,
    PromptLogprobs,
    SampledToken,
    SequenceFailure,
    StepResult,
)

# Logits of this many rows at once: for a vocabulary of 128k, 32 MiB.
_SCORED_AT_ONCE = 64


class StepResults:
    """`appended` are the drawn tokens of each sequence; one that failed has none."""

    def __init__(self) -> None:
        self.appended: dict[str, list[int]] = {}
        self.failures: dict[str, SequenceFailure] = {}
        self._tokens: list[SampledToken] = []
        self._candidates: list[Candidates] = []
        self._prompt_logprobs: list[PromptLogprobs] = []

    def score(
        self,
        chunk: PlannedChunk,
        outputs: torch.Tensor,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Score the prompt tokens that follow the first rows of the chunk, outputs [K, E]."""
        prompt = chunk.sequence.token_ids[chunk.start + 1 : chunk.start + 1 + len(outputs)]
        num_top = chunk.sequence.sampler.options.num_top_logprobs
        tokens: list[SampledToken] = []
        for first in range(0, len(outputs), _SCORED_AT_ONCE):
            some = slice(first, first + _SCORED_AT_ONCE)
            for row, token_id in zip(logits_of(outputs[some]), prompt[some], strict=True):
                logprob, top = scored(row, token_id, num_top)
                tokens.append(SampledToken(chunk.sequence_id, token_id, logprob, top))
        if all(math.isfinite(token.logprob or 0.0) for token in tokens):
            self._prompt_logprobs.append(PromptLogprobs(chunk.sequence_id, chunk.start + 1, tokens))
        else:
            self._fail(chunk.sequence_id, LogitsNotFinite("the prompt has no finite scores"))

    def add(self, sequence_id: str, drawn: Drawn) -> None:
        """What was drawn for a sequence."""
        if sequence_id in self.failures:
            return
        if drawn.failure is not None:
            self._fail(sequence_id, drawn.failure)
            return
        self.appended[sequence_id] = [token.token_id for token in drawn.tokens]
        self._tokens += [SampledToken(sequence_id, *token) for token in drawn.tokens]
        if drawn.candidates:
            self._candidates.append(Candidates(sequence_id, drawn.candidates))

    def of_step(self, step_id: int, elapsed: float, copy_elapsed: float) -> StepResult:
        return StepResult(
            step_id,
            self._tokens,
            elapsed,
            copy_elapsed,
            self._candidates,
            self._prompt_logprobs,
            list(self.failures.values()),
        )

    def _fail(self, sequence_id: str, failure: CannotDraw) -> None:
        self.failures[sequence_id] = SequenceFailure(sequence_id, failure.reason, str(failure))
