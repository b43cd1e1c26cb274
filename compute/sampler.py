"""Draws the next token of each sampled row.

Limits are applied in the order of transformers: temperature, top-k, top-p, min-p, each
on what the ones before it kept. The result is the inverse of the cumulative distribution,
in the order of token ids, at one uniform number. That number comes from a counter-based
generator, so it depends on (seed, sequence index, position) and on nothing else: not on
the batch, and not on what was drawn before.

Sources: Holtzman et al. 2019, arXiv:1904.09751 (top-p); Nguyen et al. 2024,
arXiv:2407.01082 (min-p); Salmon et al. 2011, doi:10.1145/2063384.2063405 (Philox).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from compute.errors import InvalidStep, LogitsNotFinite
from compute.types import SamplingOptions

# Most likely tokens that usually hold the top-p mass; sorting all of them costs more.
_TOP_P_FIRST_TRY = 512
_MAX_UINT64 = 2**64 - 1
_MIN_TEMPERATURE = 1e-6  # fp32 would round less to a division by zero


def check_options(sequence_id: str, options: SamplingOptions) -> None:
    """Raises InvalidStep if an option is out of its range; NaN is out of every range."""
    ranges = {
        "temperature": 0.0 <= options.temperature < math.inf,
        "top_k": options.top_k >= 0,
        "top_p": 0.0 < options.top_p <= 1.0,
        "min_p": 0.0 <= options.min_p <= 1.0,
        "seed": 0 <= options.seed <= _MAX_UINT64,
        "sequence_index": 0 <= options.sequence_index <= _MAX_UINT64,
    }
    for field, is_valid in ranges.items():
        if not is_valid:
            value = getattr(options, field)
            raise InvalidStep(
                f"sequence {sequence_id!r}: {field} {value} is out of range",
                sequence_id=sequence_id,
                field=field,
            )


@torch.inference_mode()
def sample(
    logits: torch.Tensor, options: Sequence[SamplingOptions], positions: Sequence[int]
) -> list[tuple[int, float | None]]:
    """One token per row, and its log-probability where asked for.

    logits     [K, V]  any float type; read in fp32, left as they are
    positions  [K]     index in its sequence of the token to draw

    Log-probabilities are those of the unmodified softmax. Greedy rows take the largest
    logit, the lowest id among equals.

    Raises:
        LogitsNotFinite: a row's largest logit is NaN or infinite.
    """
    if not options:
        return []
    logits = logits.float()
    largest, greedy = torch.max(logits, dim=-1)  # NaN counts as largest
    if not torch.isfinite(largest).all():
        raise LogitsNotFinite("the logits of a row are not finite: broken weights or pool")
    tokens = greedy.tolist()
    for row, (choice, position) in enumerate(zip(options, positions, strict=True)):
        if choice.temperature > 0:
            tokens[row] = _draw(logits[row] - largest[row], choice, position)
    logprobs = _logprobs(logits, options, tokens)
    return list(zip(tokens, logprobs, strict=True))


def uniform(options: SamplingOptions, position: int) -> float:
    """The number in [0, 1) that decides about the token at `position`."""
    key = np.array([options.seed, options.sequence_index], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=position).random_raw()
    return (int(bits) >> 11) * 2.0**-53


def _draw(shifted: torch.Tensor, options: SamplingOptions, position: int) -> int:
    """shifted [V]: logits less the largest, so that no temperature overflows."""
    probs = kept_probabilities(shifted, options)
    cumulative = torch.cumsum(probs, dim=0, dtype=torch.float64)
    target = uniform(options, position) * cumulative[-1]
    token = int(torch.searchsorted(cumulative, target, right=True))
    if token < probs.shape[0] and probs[token] > 0:
        return token
    return int(torch.nonzero(probs)[-1])  # rounding put the target at the very end


def kept_probabilities(shifted: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """Unnormalized probabilities [V] after all limits; 0 for tokens that were dropped."""
    scaled = shifted / max(options.temperature, _MIN_TEMPERATURE)
    if 0 < options.top_k < scaled.shape[0]:
        smallest = torch.topk(scaled, options.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < smallest, -math.inf)
    probs = torch.softmax(scaled, dim=0)
    if options.top_p < 1.0:
        probs = _nucleus(probs, options.top_p)
    if options.min_p > 0.0:
        probs = probs.masked_fill(probs < options.min_p * probs.max(), 0.0)
    return probs


def _nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest most likely tokens whose sum reaches top_p; the lower id among equals."""
    num_tried = min(_TOP_P_FIRST_TRY, probs.shape[0])
    top = torch.topk(probs, num_tried).values
    before = torch.cumsum(top, dim=0, dtype=torch.float64) - top
    if before[-1] + top[-1] < top_p and num_tried < probs.shape[0]:
        top = torch.sort(probs, descending=True).values
        before = torch.cumsum(top, dim=0, dtype=torch.float64) - top
    num_kept = int((before < top_p).sum())
    # By value, since the order of equals in a sorted or partial list is not defined.
    smallest = top[num_kept - 1]
    kept = probs > smallest
    equals = torch.nonzero(probs == smallest).flatten()
    kept[equals[: num_kept - int(kept.sum())]] = True
    return probs.masked_fill(~kept, 0.0)


def _logprobs(
    logits: torch.Tensor, options: Sequence[SamplingOptions], tokens: Sequence[int]
) -> list[float | None]:
    wanted = [row for row, choice in enumerate(options) if choice.return_logprob]
    result: list[float | None] = [None] * len(tokens)
    if wanted:
        rows = logits[wanted]
        chosen = torch.tensor([[tokens[row]] for row in wanted])
        values = (torch.gather(rows, 1, chosen)[:, 0] - torch.logsumexp(rows, dim=1)).tolist()
        for row, value in zip(wanted, values, strict=True):
            result[row] = value
    return result
