"""Log-probabilities under the unmodified softmax, and the likeliest tokens.

One row at a time: the library sums several rows in another order than a single one, and
a token's log-probability must not depend on what else is in the step.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from compute.sampling.limits import kth_largest
from compute.types import TokenLogprob


def scored(logits: torch.Tensor, token_id: int, num_top: int) -> tuple[float, list[TokenLogprob]]:
    """The log-probability of a token under logits [V], and the `num_top` likeliest."""
    logits = logits.float().cpu()
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
    values = scores.numpy()
    # By value, since the order of equals in a partial list is not defined.
    ids = np.flatnonzero(values >= kth_largest(scores, count))
    ids = ids[np.argsort(-values[ids], kind="stable")[:count]]
    pairs = zip(ids.tolist(), values[ids].tolist(), strict=True)
    return [TokenLogprob(token_id, value) for token_id, value in pairs if value > -math.inf]
