"""What a generation request must satisfy before it may wait for its turn."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from gateway.errors import InvalidField
from gateway.ports import ModelInfo, SamplingOptions
from gateway.types import GenerationRequest

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024  # characters
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_INT32_MAX = 2**31 - 1


def validate_request(
    request: GenerationRequest, model: ModelInfo, max_running: int | None = None
) -> None:
    """Refuse at once what can never work.

    Raises:
        InvalidField: with the field's name; CONTEXT_LENGTH_EXCEEDED for a prompt or
            answer over the model's length, PROMPT_EXCEEDS_POOL for one over the pool.
    """
    if not _REQUEST_ID.fullmatch(request.request_id):
        raise InvalidField("request_id", "request_id must be 1 to 64 of A-Z a-z 0-9 _ -")
    _check_prompt(request.prompt_ids, model)
    _check_lengths(len(request.prompt_ids), request.max_tokens, model)
    validate_sampling(request.sampling)
    _check_stops(request.stop)


def validate_text(field: str, num_characters: int, longest_token: int, model: ModelInfo) -> None:
    """Refuse a text too long for the model even if each token were `longest_token` characters.

    To tokenize it first could take seconds. Raises InvalidField, CONTEXT_LENGTH_EXCEEDED.
    """
    limit = longest_token * model.max_sequence_length
    if num_characters > limit:
        raise InvalidField(
            field,
            f"the prompt has {num_characters} characters; the model's length of "
            f"{model.max_sequence_length} tokens holds at most {limit}",
            reason="CONTEXT_LENGTH_EXCEEDED",
        )


def longest_sequence(model: ModelInfo) -> int:
    """Most tokens of prompt and answer together, by the model and by the pool."""
    return min(model.max_sequence_length, pool_tokens(model))


def validate_sampling(sampling: SamplingOptions) -> None:
    """Raises InvalidField for the first number out of its range; NaN is out of every range."""
    _check_range("temperature", sampling.temperature, 0, 2)
    _check_range("top_p", sampling.top_p, 0, 1)
    if sampling.top_p == 0:
        raise InvalidField("top_p", "top_p must be above 0")
    _check_range("top_k", sampling.top_k, 0, _INT32_MAX)
    _check_range("min_p", sampling.min_p, 0, 1)
    _check_range("seed", sampling.seed, 0, 2**64 - 1)
    _check_range("sequence_index", sampling.sequence_index, 0, _INT32_MAX)


def pool_tokens(model: ModelInfo) -> int:
    """Tokens that the whole page pool holds."""
    return model.pool.num_blocks * model.pool.block_size


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidField(field, f"{field} must be from {low} to {high}, not {value}")


def _check_prompt(prompt_ids: Sequence[int], model: ModelInfo) -> None:
    if not prompt_ids:
        raise InvalidField("prompt", "prompt must have at least one token")
    num_tokens, limit = len(prompt_ids), model.max_sequence_length
    if num_tokens + 1 > limit:
        raise InvalidField(
            "prompt",
            f"the prompt has {num_tokens} tokens; with at least one to generate the model "
            f"takes {limit}",
            reason="CONTEXT_LENGTH_EXCEEDED",
        )
    if num_tokens + 1 > pool_tokens(model):
        raise InvalidField(
            "prompt",
            f"the prompt has {num_tokens} tokens; with at least one to generate the page pool "
            f"takes {pool_tokens(model)}",
            reason="PROMPT_EXCEEDS_POOL",
        )
    if min(prompt_ids) < 0 or max(prompt_ids) >= model.vocab_size:
        last = model.vocab_size - 1
        index, wrong = next((i, t) for i, t in enumerate(prompt_ids) if not 0 <= t <= last)
        raise InvalidField("prompt", f"prompt: token {index} is {wrong}, not from 0 to {last}")


def _check_lengths(num_prompt_tokens: int, max_tokens: int | None, model: ModelInfo) -> None:
    if max_tokens is None:
        return
    if max_tokens < 1:
        raise InvalidField("max_tokens", f"max_tokens must be at least 1, not {max_tokens}")
    total = num_prompt_tokens + max_tokens
    asked = f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens}"
    if total > model.max_sequence_length:
        raise InvalidField(
            "max_tokens",
            f"{asked} are over the model's length of {model.max_sequence_length}",
            reason="CONTEXT_LENGTH_EXCEEDED",
        )
    if total > pool_tokens(model):
        raise InvalidField(
            "max_tokens",
            f"{asked} are over the page pool's {pool_tokens(model)}",
            reason="PROMPT_EXCEEDS_POOL",
        )


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidField("stop", f"stop may have {MAX_STOPS} entries, not {len(stops)}")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidField("stop", f"a stop string has 1 to {MAX_STOP_LENGTH} characters")
