"""One request from its tokens to its reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from gateway.choice import Choice
from gateway.decoding import Emission
from gateway.detokenizer import Detokenizer
from gateway.group import SequenceGroup
from gateway.ports import PromptLogprobs
from gateway.types import (
    FinishReason,
    GenerationEvent,
    PromptScored,
    ScoredToken,
    Started,
)


class Generation:
    """The texts of one group, between the engine that writes and one reader.

    With more continuations than are returned, all are held back until the last has
    ended, and the likeliest go out. After an end nothing more is taken in.
    """

    def __init__(self, group: SequenceGroup, new_detokenizer: Callable[[], Detokenizer]) -> None:
        self.group = group
        request = group.request
        self._num_returned = request.n
        num_choices = request.n if request.beams else request.num_sequences
        self._choices = [Choice(request, new_detokenizer()) for _ in range(num_choices)]
        self._is_started = False
        self._started: Started | None = None
        self._prompt: list[ScoredToken] = []  # of positions 1, 2, ...
        self._is_prompt_due = request.sampling.return_prompt_logprobs
        self._error: Exception | None = None
        self._news = asyncio.Event()

    @property
    def is_ended(self) -> bool:
        return self._error is not None or all(choice.is_ended for choice in self._choices)

    def is_choice_ended(self, index: int) -> bool:
        return self._choices[index].is_ended

    def start(self, num_cached_tokens: int) -> bool:
        """Announce the first opening. Whether it was: a preempted one starts only once."""
        if self._is_started:
            return False
        self._is_started = True
        request = self.group.request
        self._started = Started(request.request_id, len(request.prompt_ids), num_cached_tokens)
        self._news.set()
        return True

    def push(self, emission: Emission) -> None:
        """Take in what a step gave."""
        if emission.prompt is not None:
            self._push_prompt(emission.prompt)
        else:
            choice = self._choices[emission.index]
            choice.push(emission.tokens, emission.finish, emission.stop, emission.score)
        self._news.set()

    def _push_prompt(self, scored: PromptLogprobs) -> None:
        """Positions that are computed again, after a suspension, are known already."""
        num_known = len(self._prompt) + 1 - scored.start
        self._prompt += [
            ScoredToken(token.token_id, token.logprob or 0.0, tuple(token.top))
            for token in scored.tokens[max(0, num_known) :]
        ]

    def finish(self, reason: FinishReason) -> None:
        """End all that go on. Safe to repeat."""
        for choice in self._choices:
            choice.finish(reason)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End with an error, which the reader gets after what is there. Safe to repeat."""
        if not self.is_ended:
            self._error = error
            self._news.set()

    async def events(self) -> AsyncIterator[GenerationEvent]:
        """Everything, in order, to the end. For one reader."""
        while True:
            await self._news.wait()
            self._news.clear()
            # Before the rest: what comes during a yield is later news.
            is_ended, error = self.is_ended, self._error
            if self._started is not None:
                started, self._started = self._started, None
                yield started
            if self._is_prompt_due and len(self._prompt) >= self.group.num_prompt_tokens - 1:
                self._is_prompt_due = False
                yield PromptScored(self._prompt)
            for index, choice in enumerate(self._visible()):
                for event in choice.take(index):
                    yield event
            if error is not None:
                raise error
            if is_ended:
                return

    def _visible(self) -> list[Choice]:
        """The choices that the reader may see now."""
        if len(self._choices) == self._num_returned:
            return self._choices
        if not all(choice.is_ended for choice in self._choices):
            return []
        # A stable sort: the earlier one of equals.
        ranked = sorted(self._choices, key=lambda choice: -choice.mean_logprob)
        return ranked[: self._num_returned]
