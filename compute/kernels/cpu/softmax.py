"""The online softmax of one row: a head of decode, a head of a query of prefill.

Both take a sequence in pieces of PIECE tokens from its start on, each with a softmax of
its own, and merge them in order. So a token has the same bits whether it was decoded, or
computed in whichever chunk.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

import numpy as np

from compute.kernels.cpu.jit import LOWEST, exp_below_one, helper, store
from compute.kernels.cpu.vectors import highest, weigh

PIECE = 128  # tokens; a multiple of every block size


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


@helper
def merge_into(acc, best, other, theirs, size):  # type: ignore[no-untyped-def]
    """Add the result of another part of the tokens, not yet divided, to acc and best."""
    top = max(best[0], theirs[0])
    ours_factor = exp_below_one(best[0] - top)
    their_factor = exp_below_one(theirs[0] - top)
    best[0] = top
    best[1] = best[1] * ours_factor + theirs[1] * their_factor
    for d in range(size):
        acc[d] = acc[d] * ours_factor + other[d] * their_factor


@helper
def bend(p, num_tokens, num_hidden, first_distance, softcap, slope):  # type: ignore[no-untyped-def]
    """Apply AttentionOptions to the scores p of `num_tokens` tokens.

    The first `num_hidden` are outside the window: their weights will be 0. The first token
    is at `first_distance`, at most 0, from the query. softcap and slope are 0 for none.
    """
    for b in range(num_tokens):
        score = p[b]
        if softcap > 0:
            # tanh by an exp that cannot overflow
            e = exp_below_one(np.float32(-2) * abs(score) / softcap)
            capped = softcap * (np.float32(1) - e) / (np.float32(1) + e)
            score = capped if score >= 0 else -capped
        score += slope * np.float32(first_distance + b)
        p[b] = LOWEST if b < num_hidden else score
