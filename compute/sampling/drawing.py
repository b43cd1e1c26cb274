"""One token from a row of scores.

Source: Salmon et al. 2011, doi:10.1145/2063384.2063405 (Philox).
"""

from __future__ import annotations

import numpy as np
import torch

from compute.sampling.limits import kept_probabilities
from compute.types import SamplingOptions


def draw(scores: torch.Tensor, largest: float, options: SamplingOptions, position: int) -> int:
    """The token at `position` of its sequence, drawn from scores [V] whose maximum is
    `largest`, a finite number. The temperature is above 0."""
    probs = kept_probabilities(scores - largest, options)
    cumulative = torch.cumsum(probs, dim=0, dtype=torch.float64)
    target = uniform(options, position) * cumulative[-1]
    token = int(torch.searchsorted(cumulative, target, right=True))
    if token < probs.shape[0] and probs[token] > 0:
        return token
    return int(torch.nonzero(probs)[-1])  # rounding put the target at the very end


def uniform(options: SamplingOptions, position: int) -> float:
    """The number in [0, 1) that decides about the token at `position`."""
    key = np.array([options.seed, options.sequence_index], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=position).random_raw()
    return (int(bits) >> 11) * 2.0**-53
