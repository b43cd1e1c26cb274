"""Which tokens the limits keep: temperature, top-k, top-p, min-p, typical-p.

Sources: Holtzman et al. 2019, arXiv:1904.09751 (top-p); Nguyen et al. 2024,
arXiv:2407.01082 (min-p); Meister et al. 2022, arXiv:2202.00666 (typical-p).
"""

from __future__ import annotations

import math

import torch

from compute.types import SamplingOptions

# Most likely tokens that usually hold the top-p mass; sorting all of them costs more.
_TOP_P_FIRST_TRY = 512
# Outside of these fp32 would divide by zero, or forbidden tokens by infinity: NaN.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e30


def kept_probabilities(shifted: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """Unnormalized probabilities [V] after all limits; 0 for tokens that were dropped.

    shifted [V]: logits less the largest, so that no temperature overflows.
    """
    scaled = shifted / min(max(options.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE)
    if 0 < options.top_k < scaled.shape[0]:
        smallest = torch.topk(scaled, options.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < smallest, -math.inf)
    probs = torch.softmax(scaled, dim=0)
    if options.top_p < 1.0:
        probs = _nucleus(probs, options.top_p)
    if options.min_p > 0.0:
        probs = probs.masked_fill(probs < options.min_p * probs.max(), 0.0)
    if options.typical_p < 1.0:
        probs = _typical(probs, options.typical_p)
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


def _typical(probs: torch.Tensor, typical_p: float) -> torch.Tensor:
    """Keep the tokens whose surprise is nearest to the entropy until their sum passes
    typical_p; all of several equally near ones, as in transformers."""
    ids = torch.nonzero(probs).flatten()
    kept = probs[ids] / probs[ids].sum()
    surprise = -torch.log(kept)
    distance = (surprise - (kept * surprise).sum()).abs()
    order = torch.argsort(distance, stable=True)
    reached = torch.cumsum(kept[order], dim=0, dtype=torch.float64)
    last = min(int((reached < typical_p).sum()), len(ids) - 1)
    too_far = distance > distance[order[last]]
    return probs.index_fill(0, ids[too_far], 0.0)
