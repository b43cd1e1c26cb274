"""Answers in OpenAI's JSON: whole, and chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.ports import ModelInfo
from gateway.types import (
    Delta,
    Finished,
    FinishReason,
    GenerationEvent,
    PromptScored,
    ScoredToken,
    Started,
)
from services.gateway.frontend import Frontend
from services.gateway.rest.errors import RequestCancelled
from services.gateway.rest.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from services.gateway.rest.schema import ChatRequest, CompletionRequest

Json = dict[str, Any]


@dataclass(slots=True)
class Prompt:
    """What several choices continue. `text` as it was given; None: it was token ids."""

    token_ids: list[int]
    text: str | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    scores: Sequence[ScoredToken] = ()  # from the second token on, if asked for


@dataclass(slots=True)
class Answer:
    """One choice as it grows."""

    prompt: Prompt
    pieces: list[str] = field(default_factory=list)
    scores: list[ScoredToken] = field(default_factory=list)
    end: Finished | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Answers:
    """All choices of a request: the `n` of the first prompt, those of the second, …"""

    def __init__(self, prompts: Sequence[Prompt], n: int) -> None:
        self.prompts = prompts
        self.choices = [Answer(prompt) for prompt in prompts for _ in range(n)]
        self._n = n

    def indexes(self, prompt: int) -> range:
        """Of a prompt's choices."""
        return range(prompt * self._n, (prompt + 1) * self._n)

    def add(self, prompt: int, event: GenerationEvent) -> None:
        """Raises RequestCancelled if that is how the generation ended."""
        if isinstance(event, Started):
            self.prompts[prompt].num_tokens = event.num_prompt_tokens
            self.prompts[prompt].num_cached_tokens = event.num_cached_tokens
        elif isinstance(event, PromptScored):
            self.prompts[prompt].scores = event.tokens
        elif isinstance(event, Delta):
            choice = self.choices[self.indexes(prompt)[event.index]]
            choice.pieces.append(event.text)
            choice.scores += event.logprobs
        elif event.reason is FinishReason.CANCELLED:
            raise RequestCancelled
        else:
            self.choices[self.indexes(prompt)[event.index]].end = event

    def usage(self) -> Json:
        """A prompt counts once, however many choices it has."""
        prompt = sum(one.num_tokens for one in self.prompts)
        completion = sum(one.end.num_completion_tokens for one in self.choices if one.end)
        cached = sum(one.num_cached_tokens for one in self.prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


@dataclass(frozen=True, slots=True)
class Head:
    """What all JSON objects of one answer begin with."""

    id: str
    created: int  # seconds since 1970
    model: ModelInfo

    def object(self, kind: str, choices: list[Json], **rest: Any) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.model_id,
            "system_fingerprint": "fp_" + self.model.fingerprint.hex()[:12],
            "choices": choices,
            **rest,
        }


class Format(Protocol):
    """One endpoint's way to say the same, for one request."""

    kind: str
    chunk_kind: str

    def choice(self, index: int, answer: Answer) -> Json:
        """A finished answer."""

    def rest(self, answers: Answers) -> Json:
        """Fields beside the choices."""

    def opening(self, index: int, answer: Answer, event: Started | PromptScored) -> Json | None:
        """The first chunk of a choice, if it has one and this event is its occasion."""

    def piece(self, index: int, delta: Delta) -> Json | None:
        """A chunk with text or scores, if there are any."""

    def closing(self, index: int, end: Finished) -> Json:
        """The last chunk of a choice."""


def chunks(form: Format, answers: Answers, prompt: int, event: GenerationEvent) -> Iterator[Json]:
    """What a stream says of an event that was added."""
    indexes = answers.indexes(prompt)
    if isinstance(event, Started | PromptScored):
        for index in indexes:
            if opening := form.opening(index, answers.choices[index], event):
                yield opening
    elif isinstance(event, Delta):
        if piece := form.piece(indexes[event.index], event):
            yield piece
    else:
        yield form.closing(indexes[event.index], event)


def _ended(end: Finished) -> Json:
    """Why, in OpenAI's words; then what vLLM adds, and the score of a beam search."""
    said: Json = {"finish_reason": end.reason.value, "stop_reason": end.stop}
    return said if end.score is None else said | {"score": end.score}


class CompletionFormat:
    kind = chunk_kind = "text_completion"

    def __init__(self, asked: CompletionRequest, frontend: Frontend) -> None:
        self._asked = asked
        self._frontend = frontend
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def choice(self, index: int, answer: Answer) -> Json:
        assert answer.end is not None
        text, scores = answer.text, None
        if self._asked.echo:
            echo, scores = self._echo(index, answer.prompt)
            text = echo + text
        more = self._scores(index, answer.scores)
        if scores and more:
            more = {key: scores[key] + more[key] for key in more}
        shown = self._choice(index, text, more or scores) | _ended(answer.end)
        if self._asked.prompt_logprobs is not None:
            count, token_bytes = self._asked.prompt_logprobs, self._frontend.token_bytes
            shown["prompt_logprobs"] = prompt_logprobs(answer.prompt.scores, count, token_bytes)
        return shown

    def rest(self, answers: Answers) -> Json:  # noqa: ARG002 - only chats have some
        return {}

    def opening(self, index: int, answer: Answer, event: Started | PromptScored) -> Json | None:
        awaited = Started if self._asked.logprobs is None else PromptScored
        if not self._asked.echo or not isinstance(event, awaited):
            return None
        return self._choice(index, *self._echo(index, answer.prompt))

    def piece(self, index: int, delta: Delta) -> Json | None:
        if not (delta.text or delta.logprobs):
            return None
        return self._choice(index, delta.text, self._scores(index, delta.logprobs))

    def closing(self, index: int, end: Finished) -> Json:
        return self._choice(index, "", None) | _ended(end)

    def _choice(self, index: int, text: str, logprobs: Json | None) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None,
            "stop_reason": None,
        }

    def _echo(self, index: int, prompt: Prompt) -> tuple[str, Json | None]:
        text = prompt.text
        if text is None:
            text = self._frontend.detokenize(prompt.token_ids)
        if self._asked.logprobs is None:
            return text, None
        detokenizer = self._frontend.detokenizer()
        scores = self._writer(index).add_prompt(text, prompt.token_ids, prompt.scores, detokenizer)
        return text, scores

    def _scores(self, index: int, scores: Sequence[ScoredToken]) -> Json | None:
        return None if self._asked.logprobs is None else self._writer(index).add(scores)

    def _writer(self, index: int) -> CompletionLogprobs:
        if index not in self._logprobs:
            self._logprobs[index] = CompletionLogprobs(
                self._frontend.token_bytes, self._frontend.detokenizer(), self._asked.logprobs or 0
            )
        return self._logprobs[index]


class ChatFormat:
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, asked: ChatRequest, frontend: Frontend) -> None:
        self._asked = asked
        self._token_bytes = frontend.token_bytes

    def choice(self, index: int, answer: Answer) -> Json:
        assert answer.end is not None
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._scores(answer.scores),
            **_ended(answer.end),
        }

    def rest(self, answers: Answers) -> Json:
        count = self._asked.prompt_logprobs
        if count is None:
            return {}
        [prompt] = answers.prompts
        return {"prompt_logprobs": prompt_logprobs(prompt.scores, count, self._token_bytes)}

    def opening(
        self,
        index: int,
        answer: Answer,  # noqa: ARG002 - chats echo nothing
        event: Started | PromptScored,
    ) -> Json | None:
        if isinstance(event, PromptScored):
            return None
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def piece(self, index: int, delta: Delta) -> Json | None:
        if not (delta.text or delta.logprobs):
            return None
        return self._chunk(index, {"content": delta.text}, self._scores(delta.logprobs))

    def closing(self, index: int, end: Finished) -> Json:
        return self._chunk(index, {}, None) | _ended(end)

    def _chunk(self, index: int, delta: Json, logprobs: Json | None) -> Json:
        return {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None,
            "stop_reason": None,
        }

    def _scores(self, scores: Sequence[ScoredToken]) -> Json | None:
        if not self._asked.logprobs:
            return None
        return chat_logprobs(scores, self._asked.top_logprobs or 0, self._token_bytes)
