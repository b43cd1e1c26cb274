"""What goes in and out of the page manager, in builtin types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

BlockId = int

BLOCK_SIZES = (8, 16, 32)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class Namespace(NamedTuple):
    """What makes cached KV interchangeable. Parts are compared one by one, never joined."""

    model_fingerprint: bytes
    adapter: str = ""
    tenant: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class KvShape:
    """KV of one token: [num_layers, 2, num_kv_heads, head_size] of dtype."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        values = self.num_layers * 2 * self.num_kv_heads * self.head_size
        return values * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """A C-order array [num_blocks, num_layers, 2, block_size, num_kv_heads, head_size]."""

    shape: KvShape
    block_size: int
    num_blocks: int

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.shape.token_bytes

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class PoolHandle:
    """Where a pool is. `generation` is random and never shared by two pools."""

    name: str
    offset_bytes: int
    size_bytes: int
    layout: PoolLayout
    generation: int


@dataclass(frozen=True, slots=True)
class OpenPlan:
    sequence_id: str
    token_ids: Sequence[int]
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class OpenedSequence:
    sequence_id: str
    block_ids: list[BlockId]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    sequence_id: str
    length: int


@dataclass(frozen=True, slots=True)
class ExtendedSequence:
    """Blocks `block_ids` now stand in the table from index `first_index` on.

    With `copied_from`, the first of them replaces that block, which others still read: its
    contents must be copied before the new one is written to.
    """

    sequence_id: str
    first_index: int
    block_ids: list[BlockId]
    copied_from: BlockId | None = None


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """Make `sequence_id` a second sequence with all that `source_id` has."""

    source_id: str
    sequence_id: str


@dataclass(frozen=True, slots=True)
class ForkedSequence:
    """`length` tokens have a slot, and the KV of the first `num_computed_tokens` is there."""

    sequence_id: str
    block_ids: list[BlockId]
    length: int
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class TruncatePlan:
    """Forget the tokens from position `length` on, and their slots."""

    sequence_id: str
    length: int


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """The KV of the first `num_computed_tokens` tokens is in the pool.

    `token_ids` are the tokens from position `token_start` on; known ones must be
    equal, the others become known.
    """

    sequence_id: str
    num_computed_tokens: int
    token_start: int = 0
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    sequence_id: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Update:
    """One driver step's changes, applied in the order of the fields."""

    commits: Sequence[CommitPlan] = ()
    closes: Sequence[str] = ()
    extends: Sequence[ExtendPlan] = ()
    opens: Sequence[OpenPlan] = ()


@dataclass(frozen=True, slots=True)
class UpdateResult:
    extended: list[ExtendedSequence]
    opened: list[OpenedSequence]
    refused: list[Refusal]


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    sequence_id: str
    length: int
    num_computed_tokens: int
    block_ids: list[BlockId]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counters at one instant. num_free + num_cached + num_held == num_blocks."""

    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int
    num_sequences: int
    num_waste_slots: int
    waste_ratio: float
    num_prompt_tokens: int
    num_hit_tokens: int
    num_evictions: int
