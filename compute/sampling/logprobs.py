"""Log-probabilities under the unmodified softmax, and the likeliest tokens.

One row at a time: the library sums several rows in another order than a single one, and
a token's log-probability must not depend on what else is in the step.
"""

from __future__ import annotations

import math

import torch

from compute.types import TokenLogprob


def scored(logits: torch.Tensor, token_id: int, num_top: int) -> tuple[float, list[TokenLogprob]]:
    """The log-probability of a token under logits [V], and the `num_top` likeliest."""
    total = torch.logsumexp(logits, dim=0)
    top = likeliest(logits, num_top)
    values = (logits[[token_id, *(token.token_id for token in top)]] - total).tolist()
    ranked = [
        TokenLogprob(token.token_id, value) for token, value in zip(top, values[1:], strict=True)
    ]
    return values[0], ranked


def likeliest(scores: torch.Tensor, count: int) -> list[TokenLogprob]:
    """The `count` largest of scores [V], the lower id first among equals; impossible tokens
    are left out."""
    count = min(count, scores.shape[0])
    if count == 0:
        return []
    smallest = torch.topk(scores, count).values[-1]
    # By value, since the order of equals in a partial list is not defined.
    ids = torch.nonzero(scores >= smallest).flatten()
    values = scores[ids]
    order = torch.argsort(values, descending=True, stable=True)[:count]
    pairs = zip(ids[order].tolist(), values[order].tolist(), strict=True)
    return [TokenLogprob(token_id, value) for token_id, value in pairs if value > -math.inf]
