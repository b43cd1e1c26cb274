"""One continuation from its tokens to its text."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.detokenizer import Detokenizer
from gateway.ports import SampledToken
from gateway.stop import StopFilter
from gateway.types import Delta, Finished, FinishReason, GenerationRequest, ScoredToken


class Choice:
    """Takes in tokens, gives out text that is final. After its end it takes nothing in.

    What was not taken is merged, so a slow reader holds no more than the answer itself.
    """

    def __init__(self, request: GenerationRequest, detokenizer: Detokenizer) -> None:
        self._request = request
        self._detokenizer = detokenizer
        self._stop = StopFilter(request.stop, echo=request.echo_stop)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[ScoredToken] = []
        self._num_tokens = 0
        self._sum_logprobs = 0.0
        self._end: Finished | None = None
        self._is_end_taken = False

    @property
    def is_ended(self) -> bool:
        return self._end is not None

    @property
    def mean_logprob(self) -> float:
        return self._sum_logprobs / max(1, self._num_tokens)

    def push(
        self,
        tokens: Sequence[SampledToken],
        finish: FinishReason | None,
        stop: int | None = None,
        score: float | None = None,
    ) -> None:
        """Take in tokens; `finish` if the last of them ends it. A stop string ends it too."""
        last = len(tokens) - 1
        for index, token in enumerate(tokens):
            if self.is_ended:
                return
            is_end_token = finish is FinishReason.STOP and index == last
            # The model's own end-of-text token is no text.
            has_text = not is_end_token or (stop is not None and self._request.echo_stop)
            self._push_token(token, has_text=has_text)
            if self._stop.is_stopped:
                self.finish(FinishReason.STOP, self._stop.matched, score)
        if finish is not None:
            self.finish(finish, stop, score)

    def _push_token(self, token: SampledToken, *, has_text: bool) -> None:
        self._num_tokens += 1
        self._token_ids.append(token.token_id)
        if token.logprob is not None:
            self._sum_logprobs += token.logprob
            scored = ScoredToken(token.token_id, token.logprob, tuple(token.top))
            self._logprobs.append(scored)
        if has_text:
            text = self._detokenizer.push(token.token_id)
            is_free = self._num_tokens <= self._request.sampling.min_tokens
            self._text.append(text if is_free else self._stop.push(text))

    def finish(
        self, reason: FinishReason, stop: str | int | None = None, score: float | None = None
    ) -> None:
        """End with what is held back, if no stop string came of it. Safe to repeat."""
        if not self.is_ended:
            self._text.append(self._stop.push(self._detokenizer.flush()) + self._stop.flush())
            self._end = Finished(reason, self._num_tokens, 0, stop, score)

    def take(self, index: int) -> list[Delta | Finished]:
        """What is new, as continuation `index`."""
        news: list[Delta | Finished] = []
        if self._token_ids or any(self._text):
            logprobs = self._logprobs if self._request.sampling.return_logprob else []
            news.append(Delta("".join(self._text), self._token_ids, logprobs, index))
            self._text, self._token_ids, self._logprobs = [], [], []
        if self._end is not None and not self._is_end_taken:
            self._is_end_taken = True
            end = self._end
            news.append(Finished(end.reason, end.num_completion_tokens, index, end.stop, end.score))
        return news
