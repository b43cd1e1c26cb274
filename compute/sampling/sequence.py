"""What the draws of one sequence depend on, besides the logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from compute.sampling.counts import TokenCounts
from compute.sampling.grammar_state import Grammar, GrammarState
from compute.types import SamplingOptions

_LARGEST = torch.finfo(torch.float32).max
_MIN_PENALTY = 1e-30  # fp32 would round less to a division by zero


class SequenceSampler:
    """Biases, penalties and masks of one sequence.

    Follows the sequence's known tokens lazily (`catch_up`) and those of a step that are
    not known yet on trial (`push`, `pop`). What it remembers is a function of the tokens,
    so it survives a step that fails. A plain sampler changes no score and remembers
    nothing.
    """

    def __init__(
        self,
        options: SamplingOptions,
        num_prompt_tokens: int = 0,
        grammar: Grammar | None = None,
    ) -> None:
        self.options = options
        self._num_prompt_tokens = num_prompt_tokens
        self._grammar = grammar
        self._text: GrammarState | None = None
        self._counts: TokenCounts | None = None
        self._num_counted = self._num_parsed = num_prompt_tokens
        self._biased = torch.tensor(
            [token_id for token_id, _ in options.logit_bias], dtype=torch.long
        )
        self._biases = torch.tensor([bias for _, bias in options.logit_bias], dtype=torch.float32)
        self._uses_penalties = (
            options.repetition_penalty != 1.0
            or options.frequency_penalty != 0.0
            or options.presence_penalty != 0.0
        )
        self.is_plain = not (
            self._uses_penalties or options.logit_bias or options.min_tokens or grammar
        )

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Take note of all known tokens, those that `processed` has seen before among them.

        Raises GrammarFailed (compute.errors): there is no such grammar, or the generated
        tokens do not fit it.
        """
        if self._uses_penalties:
            if self._counts is None:
                self._counts = TokenCounts(token_ids[: self._num_prompt_tokens])
            for token_id in token_ids[self._num_counted :]:
                self._counts.add(token_id)
            self._num_counted = len(token_ids)
        if self._grammar is not None:
            if self._text is None:
                self._text = self._grammar.begin()
            for token_id in token_ids[self._num_parsed :]:
                self._text.advance(token_id)
                self._num_parsed += 1

    def push(self, token_id: int) -> None:
        """The next token, on trial. Raises GrammarFailed if the grammar forbids it; then
        nothing has changed."""
        if self._text is not None:
            self._text.advance(token_id)
        if self._counts is not None:
            self._counts.add(token_id)

    def pop(self, token_id: int) -> None:
        """Take back the last `push`, which was of this token."""
        if self._text is not None:
            self._text.go_back()
        if self._counts is not None:
            self._counts.remove(token_id)

    def processed(self, scores: torch.Tensor, position: int) -> torch.Tensor:
        """Scores [V] of the token at `position`, biased, penalized and masked; a copy.

        Raises GrammarFailed (compute.errors).
        """
        options = self.options
        scores = scores.clone()
        if options.logit_bias:
            scores[self._biased] += self._biases
        if self._counts is not None:
            self._penalize(scores, self._counts)
        free = scores
        num_generated = position - self._num_prompt_tokens
        if options.stop_token_ids and num_generated < options.min_tokens:
            scores = scores.index_fill(0, torch.tensor(options.stop_token_ids), -math.inf)
        if self._text is None:
            return scores
        forbidden = ~self._text.allowed()
        masked = scores.masked_fill(forbidden, -math.inf)
        if free is not scores and float(masked.max()) == -math.inf:
            # The text is complete before min_tokens: the grammar cannot be stretched.
            return free.masked_fill(forbidden, -math.inf)
        return masked

    def _penalize(self, scores: torch.Tensor, counts: TokenCounts) -> None:
        options = self.options
        if options.repetition_penalty != 1.0:
            ids = counts.met()
            values, penalty = scores[ids], max(options.repetition_penalty, _MIN_PENALTY)
            penalized = torch.where(values < 0, values * penalty, values / penalty)
            scores[ids] = penalized.clamp(max=_LARGEST)
        if options.frequency_penalty or options.presence_penalty:
            ids, numbers = counts.generated()
            scores[ids] -= options.frequency_penalty * numbers + options.presence_penalty
