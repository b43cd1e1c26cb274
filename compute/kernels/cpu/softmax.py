"""The online softmax of one row: a head of decode, a head of a query of prefill.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

from compute.kernels.cpu.jit import exp_below_one, helper, store
from compute.kernels.cpu.vectors import highest, weigh


@helper
def absorb(acc, best, p, num_tokens, size):  # type: ignore[no-untyped-def]
    """Take in the scores p of `num_tokens` more tokens; they become weights.

    acc [size] and best (maximum, sum) are scaled to the new maximum; the weights' values
    are still to be added to acc.
    """
    top = highest(p, num_tokens)
    if top > best[0]:
        factor = exp_below_one(best[0] - top)
        for d in range(size):
            acc[d] *= factor
        best[0] = top
        best[1] *= factor
    best[1] += weigh(p, num_tokens, best[0])


@helper
def finish(out, acc, total, size):  # type: ignore[no-untyped-def]
    """out = acc / total, where total is the sum of all weights."""
    for d in range(size):
        store(out, d, acc[d] / total)
