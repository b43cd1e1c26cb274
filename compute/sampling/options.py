"""Which sampling options are in range."""

from __future__ import annotations

import math

from compute.errors import InvalidStep
from compute.types import SamplingOptions

_MAX_UINT64 = 2**64 - 1
_MAX_INT32 = 2**31 - 1
_MOST_BIASES = 1024
_MOST_STOP_TOKENS = 128  # 64 that a client named, and the model's own
_MOST_TOP_LOGPROBS = 20


def check_options(sequence_id: str, options: SamplingOptions, vocab_size: int) -> None:
    """Raises InvalidStep if an option is out of its range; NaN is out of every range."""
    ranges = {
        "temperature": 0.0 <= options.temperature < math.inf,
        "top_k": options.top_k >= 0,
        "top_p": 0.0 < options.top_p <= 1.0,
        "min_p": 0.0 <= options.min_p <= 1.0,
        "typical_p": 0.0 < options.typical_p <= 1.0,
        "repetition_penalty": 0.0 < options.repetition_penalty <= 10.0,
        "frequency_penalty": -2.0 <= options.frequency_penalty <= 2.0,
        "presence_penalty": -2.0 <= options.presence_penalty <= 2.0,
        "min_tokens": 0 <= options.min_tokens <= _MAX_INT32,
        "seed": 0 <= options.seed <= _MAX_UINT64,
        "sequence_index": 0 <= options.sequence_index <= _MAX_UINT64,
        "num_top_logprobs": 0 <= options.num_top_logprobs <= _MOST_TOP_LOGPROBS,
        "num_candidates": 0 <= options.num_candidates <= vocab_size,
    }
    for field, is_valid in ranges.items():
        if not is_valid:
            raise _refused(sequence_id, field, f"{getattr(options, field)} is out of range")
    _check_biases(sequence_id, options, vocab_size)
    stops = options.stop_token_ids
    if len(stops) > _MOST_STOP_TOKENS:
        raise _refused(sequence_id, "stop_token_ids", f"{len(stops)} are too many")
    for token_id in stops:
        if not 0 <= token_id < vocab_size:
            raise _refused(sequence_id, "stop_token_ids", f"no token {token_id}")


def _check_biases(sequence_id: str, options: SamplingOptions, vocab_size: int) -> None:
    biases = options.logit_bias
    if not biases:
        return
    if len(biases) > _MOST_BIASES:
        raise _refused(sequence_id, "logit_bias", f"{len(biases)} are too many")
    if len({token_id for token_id, _ in biases}) < len(biases):
        raise _refused(sequence_id, "logit_bias", "a token has two")
    for token_id, bias in biases:
        if not 0 <= token_id < vocab_size:
            raise _refused(sequence_id, "logit_bias", f"no token {token_id}")
        if not -100.0 <= bias <= 100.0:
            raise _refused(sequence_id, "logit_bias", f"{bias} is out of range")


def _refused(sequence_id: str, field: str, problem: str) -> InvalidStep:
    return InvalidStep(
        f"sequence {sequence_id!r}: {field}: {problem}", sequence_id=sequence_id, field=field
    )
