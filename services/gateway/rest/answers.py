"""Answers in OpenAI's JSON: whole, and chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.ports import ModelInfo
from gateway.types import Delta, FinishReason, GenerationEvent, Started
from services.gateway.rest.errors import RequestCancelled

Json = dict[str, Any]


@dataclass(slots=True)
class Answer:
    """One choice as it grows."""

    pieces: list[str] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    finish_reason: str | None = None

    def add(self, event: GenerationEvent) -> None:
        """Raises RequestCancelled if that is how the generation ended."""
        if isinstance(event, Started):
            self.num_prompt_tokens = event.num_prompt_tokens
            self.num_cached_tokens = event.num_cached_tokens
        elif isinstance(event, Delta):
            self.pieces.append(event.text)
        elif event.reason is FinishReason.CANCELLED:
            raise RequestCancelled
        else:
            self.num_completion_tokens = event.num_completion_tokens
            self.finish_reason = event.reason.value

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def usage(answers: Sequence[Answer]) -> Json:
    prompt = sum(answer.num_prompt_tokens for answer in answers)
    completion = sum(answer.num_completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(answer.num_cached_tokens for answer in answers)
        },
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
    """One endpoint's way to say the same."""

    kind: str
    chunk_kind: str

    def choice(self, index: int, answer: Answer) -> Json:
        """A finished answer."""

    def opening(self, index: int) -> Json | None:
        """The first chunk of a choice, if it has one."""

    def piece(self, index: int, text: str) -> Json:
        """A chunk with text."""

    def closing(self, index: int, finish_reason: str) -> Json:
        """The last chunk of a choice."""


class CompletionFormat:
    kind = chunk_kind = "text_completion"

    def choice(self, index: int, answer: Answer) -> Json:
        return self._choice(index, answer.text, answer.finish_reason)

    def opening(self, index: int) -> Json | None:  # noqa: ARG002 - only chats have one
        return None

    def piece(self, index: int, text: str) -> Json:
        return self._choice(index, text, None)

    def closing(self, index: int, finish_reason: str) -> Json:
        return self._choice(index, "", finish_reason)

    def _choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


class ChatFormat:
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def choice(self, index: int, answer: Answer) -> Json:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }

    def opening(self, index: int) -> Json | None:
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def piece(self, index: int, text: str) -> Json:
        return self._chunk(index, {"content": text}, None)

    def closing(self, index: int, finish_reason: str) -> Json:
        return self._chunk(index, {}, finish_reason)

    def _chunk(self, index: int, delta: Json, finish_reason: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
