"""What a generation request must satisfy before it may wait for its turn."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence, Sized

from gateway.errors import InvalidField
from gateway.ports import ModelInfo, SamplingOptions
from gateway.types import BeamOptions, GenerationRequest

MAX_SEQUENCES = 64  # n and best_of
MAX_BEAMS = 32
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_STOP_TOKENS = 64
MAX_BIASES = 1024
MAX_MESSAGES = 4096  # of a conversation
MAX_TOP_LOGPROBS = 20
MAX_SALT_BYTES = 128
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_INT32_MAX = 2**31 - 1

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_k": (0, _INT32_MAX),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "repetition_penalty": (0, 10),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "min_tokens": (0, _INT32_MAX),
    "seed": (0, 2**64 - 1),
    "sequence_index": (0, _INT32_MAX),
    "num_top_logprobs": (0, MAX_TOP_LOGPROBS),
}
_ABOVE_ZERO = ("top_p", "typical_p", "repetition_penalty")


def validate_request(
    request: GenerationRequest, model: ModelInfo, max_running: int | None = None
) -> None:
    """Refuse at once what can never work. `max_running`: sequences that a step may have.

    Raises:
        InvalidField: with the name of the field, here or in the sampling or beam options;
            CONTEXT_LENGTH_EXCEEDED for a prompt or answer over the model's length,
            PROMPT_EXCEEDS_POOL for sequences that never fit into the pool together.
    """
    if not _REQUEST_ID.fullmatch(request.request_id):
        raise InvalidField("request_id", "request_id must be 1 to 64 of A-Z a-z 0-9 _ -")
    _check_range("priority", request.priority, -100, 100)
    _check_salt(request.salt)
    validate_sampling(request.sampling, model.vocab_size)
    _check_stops(request.stop)
    _check_counts(request, max_running)
    if request.beams is not None:
        _check_beams(request, request.beams)
    _check_structure(request)
    _check_prompt(request.prompt_ids, model)
    _check_lengths(request, model)
    _check_room(request, model)


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


def validate_sampling(sampling: SamplingOptions, vocab_size: int) -> None:
    """Raises InvalidField for the first value out of its range; NaN is out of every range."""
    for field, (low, high) in _RANGES.items():
        value = getattr(sampling, field)
        _check_range(field, value, low, high)
        if value == 0 and field in _ABOVE_ZERO:
            raise InvalidField(field, f"{field} must be above 0")
    _check_biases(sampling.logit_bias, vocab_size)
    _check_stop_tokens(sampling.stop_token_ids, vocab_size)
    is_reported = sampling.return_logprob or sampling.return_prompt_logprobs
    if sampling.num_top_logprobs and not is_reported:
        raise InvalidField("num_top_logprobs", "num_top_logprobs needs log-probabilities")


def pool_tokens(model: ModelInfo) -> int:
    """Tokens that the whole page pool holds."""
    return model.pool.num_blocks * model.pool.block_size


def group_blocks(num_prompt_tokens: int, num_tokens: int, num_sequences: int, size: int) -> int:
    """Blocks of `size` tokens that sequences with one prompt and `num_tokens` each hold.

    Whole blocks of the prompt are there once. Each sequence writes to its own copy of
    a partial one.
    """
    num_shared = num_prompt_tokens // size
    return num_shared + num_sequences * (-(-num_tokens // size) - num_shared)


def longest_sequence(model: ModelInfo, num_prompt_tokens: int = 0, num_sequences: int = 1) -> int:
    """Most tokens of prompt and answer together, by the model and by the pool.

    `num_sequences` of them, that share the prompt, are in the pool together.
    """
    size = model.pool.block_size
    num_shared = min(num_prompt_tokens // size, model.pool.num_blocks)
    num_own = (model.pool.num_blocks - num_shared) // num_sequences
    return min(model.max_sequence_length, (num_shared + num_own) * size)


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidField(field, f"{field} must be from {low} to {high}, not {value}")


def _check_salt(salt: str) -> None:
    num_bytes = len(salt.encode("utf-8", "replace"))
    if num_bytes > MAX_SALT_BYTES:
        raise InvalidField("salt", f"salt may have {MAX_SALT_BYTES} bytes, not {num_bytes}")


def validate_length(field: str, entries: Sized, limit: int) -> None:
    """Raises InvalidField for a list that is too long. Cheap: for lists not yet looked at."""
    if len(entries) > limit:
        raise InvalidField(field, f"{field} may have {limit} entries, not {len(entries)}")


def _check_biases(biases: Sequence[tuple[int, float]], vocab_size: int) -> None:
    validate_length("logit_bias", biases, MAX_BIASES)
    seen: set[int] = set()
    for index, (token_id, bias) in enumerate(biases):
        path = f"logit_bias[{index}]"
        _check_range(f"{path}.token_id", token_id, 0, vocab_size - 1)
        _check_range(f"{path}.bias", bias, -100, 100)
        if token_id in seen:
            raise InvalidField(f"{path}.token_id", f"{path}.token_id: {token_id} is there twice")
        seen.add(token_id)


def _check_stop_tokens(token_ids: Sequence[int], vocab_size: int) -> None:
    validate_length("stop_token_ids", token_ids, MAX_STOP_TOKENS)
    for index, token_id in enumerate(token_ids):
        _check_range(f"stop_token_ids[{index}]", token_id, 0, vocab_size - 1)


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidField("stop", f"stop may have {MAX_STOPS} entries, not {len(stops)}")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            field = f"stop[{index}]"
            raise InvalidField(field, f"{field} must have 1 to {MAX_STOP_LENGTH} characters")


def _check_counts(request: GenerationRequest, max_running: int | None) -> None:
    n, best_of = request.n, request.best_of
    _check_range("n", n, 1, MAX_SEQUENCES)
    if best_of is not None:
        _check_range("best_of", best_of, 1, MAX_SEQUENCES)
        if best_of < n:
            raise InvalidField(
                "best_of", f"best_of must be at least {n}, as many as are returned, not {best_of}"
            )
    if request.beams is not None:
        _check_range("num_beams", request.beams.num_beams, 2, MAX_BEAMS)
    if max_running is not None and request.num_sequences > max_running:
        field = _multiplier(request)
        text = f"{field} may be at most {max_running}, the sequences that run at once"
        raise InvalidField(field, text)
    # As in vLLM: greedy continuations would all be the same, at several times the cost.
    if request.beams is None and request.sampling.temperature == 0 and request.num_sequences > 1:
        field = "n" if n > 1 else "best_of"
        raise InvalidField(field, f"{field} above 1 needs a temperature above 0")


def _multiplier(request: GenerationRequest) -> str:
    """The option that says how many sequences there are."""
    if request.beams is not None:
        return "num_beams"
    return "n" if request.best_of is None else "best_of"


def _check_beams(request: GenerationRequest, beams: BeamOptions) -> None:
    _check_range("length_penalty", beams.length_penalty, -10, 10)
    if request.n > beams.num_beams:
        text = f"n may be at most the number of beams, {beams.num_beams}, not {request.n}"
        raise InvalidField("n", text)
    sampling = request.sampling
    for field, is_asked in (
        ("best_of", request.best_of is not None),
        ("temperature", sampling.temperature != 0),
        ("top_k", sampling.top_k != 0),
        ("top_p", sampling.top_p != 1),
        ("min_p", sampling.min_p != 0),
        ("typical_p", sampling.typical_p != 1),
        ("stop", bool(request.stop)),
        ("return_logprob", sampling.return_logprob),
        ("return_prompt_logprobs", sampling.return_prompt_logprobs),
        ("grammar", bool(sampling.grammar)),
    ):
        if is_asked:
            text = "must be 0 in" if field == "temperature" else "cannot be used with"
            raise InvalidField(field, f"{field} {text} a beam search")


def _check_structure(request: GenerationRequest) -> None:
    """A structure ends where it ends."""
    if not request.sampling.grammar:
        return
    for field, is_asked in (
        ("ignore_eos", request.ignore_eos),
        ("min_tokens", request.sampling.min_tokens > 0),
    ):
        if is_asked:
            raise InvalidField(field, f"{field} cannot be used with a structured answer")


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


def _check_lengths(request: GenerationRequest, model: ModelInfo) -> None:
    num_prompt_tokens, max_tokens = len(request.prompt_ids), request.max_tokens
    if max_tokens is not None:
        if max_tokens < 1:
            raise InvalidField("max_tokens", f"max_tokens must be at least 1, not {max_tokens}")
        if num_prompt_tokens + max_tokens > model.max_sequence_length:
            raise InvalidField(
                "max_tokens",
                f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} are over the "
                f"model's length of {model.max_sequence_length}",
                reason="CONTEXT_LENGTH_EXCEEDED",
            )
    min_tokens = request.sampling.min_tokens
    room = longest_sequence(model, num_prompt_tokens, request.num_sequences) - num_prompt_tokens
    most = max_tokens or max(room, 1)
    if min_tokens > most:
        text = f"min_tokens may be at most {most}, the most that are generated, not {min_tokens}"
        raise InvalidField("min_tokens", text)


def _check_room(request: GenerationRequest, model: ModelInfo) -> None:
    """All sequences of a request must fit into the pool together: they run together."""
    num_prompt_tokens, pool = len(request.prompt_ids), model.pool
    asked = request.max_tokens or 1
    length = num_prompt_tokens + asked

    def never_fit(num_sequences: int) -> bool:
        needed = group_blocks(num_prompt_tokens, length, num_sequences, pool.block_size)
        return needed > pool.num_blocks

    if never_fit(1):
        raise InvalidField(
            "max_tokens",
            f"{num_prompt_tokens} prompt tokens and max_tokens {asked} are over the page pool's "
            f"{pool_tokens(model)}",
            reason="PROMPT_EXCEEDS_POOL",
        )
    if never_fit(request.num_sequences):
        field, count = _multiplier(request), request.num_sequences
        raise InvalidField(
            field,
            f"{field}: {count} sequences with {num_prompt_tokens} prompt tokens and {asked} to "
            f"generate are over the page pool's {pool.num_blocks} blocks",
            reason="PROMPT_EXCEEDS_POOL",
        )
