"""One request from its tokens to its reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from gateway.detokenizer import Detokenizer
from gateway.ports import SampledToken
from gateway.sequence import Sequence
from gateway.stop import StopFilter
from gateway.types import Delta, Finished, FinishReason, GenerationEvent, Started


class Generation:
    """The text of one sequence, between the engine that writes and one reader.

    What the reader has not taken is merged, so a slow reader holds no more than the
    answer itself. After an end nothing more is taken in.
    """

    def __init__(self, sequence: Sequence, detokenizer: Detokenizer) -> None:
        self.sequence = sequence
        self._detokenizer = detokenizer
        self._stop = StopFilter(sequence.request.stop)
        self._is_started = False
        self._started: Started | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._num_tokens = 0
        self._end: Finished | Exception | None = None
        self._news = asyncio.Event()

    @property
    def is_ended(self) -> bool:
        return self._end is not None

    def start(self, num_cached_tokens: int) -> bool:
        """Announce the first opening. Whether it was: a preempted one starts only once."""
        if self._is_started:
            return False
        self._is_started = True
        request = self.sequence.request
        self._started = Started(request.request_id, len(request.prompt_ids), num_cached_tokens)
        self._news.set()
        return True

    def push(self, token: SampledToken, finish: FinishReason | None) -> None:
        """Take in a token; `finish` if it is the last. A stop string ends it too."""
        if self.is_ended:
            return
        self._num_tokens += 1
        self._token_ids.append(token.token_id)
        if token.logprob is not None:
            self._logprobs.append(token.logprob)
        if finish is not FinishReason.STOP:  # the end-of-text token is no text
            self._text.append(self._stop.push(self._detokenizer.push(token.token_id)))
        if self._stop.is_stopped:
            finish = FinishReason.STOP
        if finish:
            self.finish(finish)
        self._news.set()

    def finish(self, reason: FinishReason) -> None:
        """End with what is held back, if no stop string came of it. Safe to repeat."""
        if not self.is_ended:
            self._text.append(self._stop.push(self._detokenizer.flush()) + self._stop.flush())
            self._set_end(Finished(reason, self._num_tokens))

    def fail(self, error: Exception) -> None:
        """End with an error, which the reader gets after what is there. Safe to repeat."""
        if not self.is_ended:
            self._set_end(error)

    def _set_end(self, end: Finished | Exception) -> None:
        self._end = end
        self._news.set()

    async def events(self) -> AsyncIterator[GenerationEvent]:
        """Everything, in order, to the end. For one reader."""
        while True:
            await self._news.wait()
            self._news.clear()
            end = self._end  # before the rest: what comes during a yield is later news
            if self._started is not None:
                started, self._started = self._started, None
                yield started
            if self._token_ids or any(self._text):
                yield self._take_delta()
            if isinstance(end, Finished):
                yield end
                return
            if end is not None:
                raise end

    def _take_delta(self) -> Delta:
        delta = Delta("".join(self._text), self._token_ids, self._logprobs)
        self._text, self._token_ids, self._logprobs = [], [], []
        return delta
