"""Rows of logits and what is drawn from them, for the tests of sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compute.sampling import Drawn, RowsToDraw, SequenceSampler, sample
from compute.types import SamplingOptions


def make_logits(vocab_size=1000, seed=0, spread=2.0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def draw_all(
    logits: torch.Tensor, options: Sequence[SamplingOptions], positions: Sequence[int]
) -> list[Drawn]:
    """One draw from each row; the tokens before it do not matter."""
    wanted = [
        RowsToDraw(SequenceSampler(choice), row, [0] * position)
        for row, (choice, position) in enumerate(zip(options, positions, strict=True))
    ]
    return sample(logits, wanted)


def tokens_of(logits, options, positions) -> list[int]:
    """Like draw_all, if each draw succeeds."""
    drawn = draw_all(logits, options, positions)
    assert all(each.failure is None for each in drawn)
    return [token.token_id for each in drawn for token in each.tokens]
