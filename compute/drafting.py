"""A draft model: guesses of next tokens, its KV in the same blocks as the model's.

Source: Leviathan et al. 2022, arXiv:2211.17192 (guesses by a smaller model); Kwon et al.
2023, arXiv:2309.06180 (KV in pages).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from compute.batching import PackedStep, pack
from compute.errors import ModelUnsupported
from compute.model import Decoder
from compute.sampling import RowsToDraw, sample
from compute.sequences import PlannedChunk
from compute.types import KvShape


class DraftModel:
    """Draws guesses the way the sampler would, by its own logits and the same numbers.

    A guess and the token in its place come from the same uniform number, so they are
    equal as often as the two models' distributions overlap, about.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._kv_layers: list[torch.Tensor] = []

    def attach(self, pool: torch.Tensor, num_layers: int) -> None:
        """Its KV is behind the first `num_layers` layers of pool [P, L, 2, B, Hkv, D]."""
        self._kv_layers = draft_layers(pool, num_layers, self.decoder.config.kv_shape(""))

    def detach(self) -> None:
        self._kv_layers = []

    def guess(
        self, chunks: Sequence[PlannedChunk], wanted: Mapping[int, int], block_size: int
    ) -> list[PlannedChunk]:
        """The chunks, those of `wanted` with so many guesses; fewer where none can be drawn."""
        guesses: dict[int, list[int]] = {n: [] for n in wanted}
        going = list(wanted)
        while going:
            packed = pack([_last(chunks[n], guesses[n]) for n in going], block_size)
            drawn = self._draw(packed, [(chunks[n], guesses[n]) for n in going])
            for n, token_id in zip(tuple(going), drawn, strict=True):
                if token_id is not None:
                    guesses[n].append(token_id)
                if token_id is None or len(guesses[n]) == wanted[n]:
                    going.remove(n)
        return [
            chunk.with_guesses(guesses[n]) if n in guesses else chunk
            for n, chunk in enumerate(chunks)
        ]

    def write(self, packed: PackedStep) -> None:
        """Write its KV of all the step's tokens, so that it can guess from them later."""
        nothing = torch.empty(0, dtype=torch.int64)
        batch = dataclasses.replace(packed.batch, output_rows=nothing)
        self.decoder.forward(batch, self._kv_layers)

    def _draw(
        self, packed: PackedStep, sequences: Sequence[tuple[PlannedChunk, list[int]]]
    ) -> list[int | None]:
        logits = self.decoder.logits(self.decoder.forward(packed.batch, self._kv_layers))
        rows = [
            RowsToDraw(
                chunk.sequence.sampler,
                outputs[-1],
                chunk.sequence.token_ids,
                sent=[*chunk.sent, *guesses],
            )
            for (chunk, guesses), outputs in zip(sequences, packed.outputs, strict=True)
        ]
        return [
            drawn.tokens[0].token_id if drawn.tokens else None for drawn in sample(logits, rows)
        ]


def _last(chunk: PlannedChunk, guesses: Sequence[int]) -> PlannedChunk:
    """What the draft model computes for the next guess: the chunk first, then each guess."""
    if not guesses:
        return chunk
    longer = chunk.with_guesses(guesses)
    return dataclasses.replace(longer, start=longer.end - 1, num_guesses=0)


def widened(shape: KvShape, draft: KvShape) -> KvShape:
    """`shape` with as many more layers as the draft model's KV takes."""
    more = math.ceil(_values(draft) / (_values(shape) / shape.num_layers))
    return dataclasses.replace(shape, num_layers=shape.num_layers + more)


def draft_layers(pool: torch.Tensor, num_layers: int, draft: KvShape) -> list[torch.Tensor]:
    """Its layers [P, 2, B, Hkv, D], as views behind the first `num_layers` of the pool."""
    num_blocks, block_size = pool.shape[0], pool.shape[3]
    heads, size = draft.num_kv_heads, draft.head_size
    plane = block_size * heads * size
    strides = (pool.stride(0), plane, heads * size, size, 1)
    first = pool.storage_offset() + num_layers * pool.stride(1)
    return [
        pool.as_strided((num_blocks, 2, block_size, heads, size), strides, first + 2 * n * plane)
        for n in range(draft.num_layers)
    ]


def check_fits(model: Decoder, draft: Decoder) -> None:
    """Raises ModelUnsupported if it cannot guess for the model."""
    ours, drafts = model.config, draft.config
    if drafts.vocab_size != ours.vocab_size:
        raise ModelUnsupported(
            f"the draft model has {drafts.vocab_size} tokens, the model {ours.vocab_size}"
        )
    if drafts.max_sequence_length < ours.max_sequence_length:
        raise ModelUnsupported(
            f"the draft model takes {drafts.max_sequence_length} tokens, "
            f"the model {ours.max_sequence_length}"
        )


def _values(shape: KvShape) -> int:
    """Of one token."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_size
