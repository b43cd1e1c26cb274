"""What applications ask for and what they get, in builtin types."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gateway.ports import SamplingOptions


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated request for one continuation of `prompt_ids`.

    max_tokens None means: as many as the model's length and the pool allow.
    `log_id` is what the logs of all services call it; empty: its request_id. Unlike
    that, it comes from the client and need not be unique.
    """

    request_id: str
    prompt_ids: list[int]
    max_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    tenant: str = ""
    log_id: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Final text (whole characters only, may be empty) and the tokens since the last delta."""

    text: str
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    num_completion_tokens: int


GenerationEvent = Started | Delta | Finished
