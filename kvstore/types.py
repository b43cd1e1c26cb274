"""What goes in and out of the page manager, in builtin types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

BlockId = int

BLOCK_SIZES = (8, 16, 32)
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "int8": 1}
QUANTIZED = ("fp8_e4m3", "int8")  # of these, each head of a token has a scale
SCALE_BYTES = 4  # fp32


class Namespace(NamedTuple):
    """What makes cached KV interchangeable. Parts are compared one by one, never joined."""

    model_fingerprint: bytes
    adapter: str = ""
    tenant: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class KvShape:
    """KV of one token: [num_layers, 2, num_kv_heads, head_size] of dtype, and its scales."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        head_bytes = self.head_size * DTYPE_BYTES[self.dtype]
        if self.dtype in QUANTIZED:
            head_bytes += SCALE_BYTES
        return self.num_layers * 2 * self.num_kv_heads * head_bytes


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """A C-order array [num_blocks, num_layers, 2, block_size, num_kv_heads, head_size].

    In quantized KV, [block_size, num_kv_heads] scales in fp32 are behind each
    [block_size, num_kv_heads, head_size] elements.
    """

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
class PosixMemory:
    """A POSIX shared memory object, by its name without the leading slash."""

    name: str


@dataclass(frozen=True, slots=True)
class CudaIpcMemory:
    """An allocation on a CUDA device, by its handle of legacy CUDA IPC, 64 bytes.

    It lasts as long as the process that made it, which its PID namespace knows as
    `exporter_pid`. Namespaces are told apart by their inode numbers.
    """

    handle: bytes
    device_uuid: bytes
    exporter_pid: int
    exporter_pid_namespace: int


SharedMemory = PosixMemory | CudaIpcMemory


@dataclass(frozen=True, slots=True)
class PoolHandle:
    """Where a pool is. `generation` is random and never shared by two pools."""

    memory: SharedMemory
    offset_bytes: int
    size_bytes: int
    layout: PoolLayout
    generation: int


class BlockCopy(NamedTuple):
    """Copy a block's contents to another one.

    Ids below the page pool's number of blocks are its own, those above the host pool's:
    the first of its blocks has the first such id.
    """

    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Blocks of the page pool that a tenant is sure of, and that it may have at most."""

    floor: int = 0
    quota: int | None = None


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What a tenant has at one instant, in blocks, and what it has asked for, in tokens."""

    tenant: str
    floor: int
    quota: int | None
    num_held: int
    num_cached: int
    num_pinned: int
    num_prompt_tokens: int
    num_hit_tokens: int


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How a pool is managed. Pins are counted in blocks of their whole prefixes."""

    most_pinned: int
    most_pinned_by_tenant: int


@dataclass(frozen=True, slots=True)
class OpenPlan:
    """`driver_state` is kept with the sequence and given back, never read.

    Sequences of one `group` are suspended and resumed together. One that `is_resumption`
    was open before, so that what it finds in the cache is no news.
    """

    sequence_id: str
    token_ids: Sequence[int]
    namespace: Namespace
    driver_state: bytes = b""
    group: str = ""
    is_resumption: bool = False


@dataclass(frozen=True, slots=True)
class OpenedSequence:
    """The KV of the first `num_cached_tokens` is there once `copies` were run."""

    sequence_id: str
    block_ids: list[BlockId]
    num_cached_tokens: int
    copies: list[BlockCopy] = field(default_factory=list)


# One for each sequence of every step. Frozen ones would take five times as long to make.
@dataclass(slots=True)
class ExtendPlan:
    sequence_id: str
    length: int


@dataclass(slots=True)
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
    """Make `sequence_id` a second sequence with the first `length` tokens of `source_id`.

    0: with all that are known.
    """

    source_id: str
    sequence_id: str
    length: int = 0


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


@dataclass(slots=True)
class CommitPlan:
    """The KV of the first `num_computed_tokens` tokens is in the pool.

    `token_ids` are the tokens from position `token_start` on; known ones must be
    equal, the others become known.
    """

    sequence_id: str
    num_computed_tokens: int
    token_start: int = 0
    token_ids: Sequence[int] = ()
    driver_state: bytes | None = None  # None: as it was


class SuspendMode(Enum):
    """How a sequence leaves the page pool."""

    AUTO = "auto"  # whichever costs less
    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class SuspendPlan:
    sequence_id: str
    mode: SuspendMode = SuspendMode.AUTO


@dataclass(frozen=True, slots=True)
class SuspendedSequence:
    """What was decided, why, and what both ways were expected to take.

    `num_freed_blocks` of the page pool are held by nobody any more.
    """

    sequence_id: str
    mode: SuspendMode
    reason: str
    swap_seconds: float
    recompute_seconds: float
    num_copied_blocks: int
    num_freed_blocks: int


@dataclass(frozen=True, slots=True)
class ResumedSequence:
    """All known tokens have a slot; the KV of the first ones is there after `copies`."""

    sequence_id: str
    block_ids: list[BlockId]
    length: int
    num_computed_tokens: int
    copies: list[BlockCopy]


@dataclass(slots=True)
class SwapStats:
    """How often each way was chosen, and the seconds that it was expected to take and took."""

    num_swaps: int = 0
    num_recomputes: int = 0
    swap_predicted_seconds: float = 0.0
    swap_actual_seconds: float = 0.0
    recompute_predicted_seconds: float = 0.0
    recompute_actual_seconds: float = 0.0

    def copy(self) -> SwapStats:
        return replace(self)

    def decided(self, mode: SuspendMode, seconds: float) -> None:
        if mode is SuspendMode.SWAP:
            self.num_swaps += 1
            self.swap_predicted_seconds += seconds
        else:
            self.num_recomputes += 1
            self.recompute_predicted_seconds += seconds


@dataclass(frozen=True, slots=True)
class PinPlan:
    """Keep the whole blocks of a prefix: of tokens in a namespace, or of a sequence.

    The higher the priority, the later it gives way to other pins.
    """

    pin_id: str
    owner: str
    ttl_seconds: float
    namespace: Namespace | None = None
    token_ids: Sequence[int] = ()
    sequence_id: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class PinInfo:
    """`num_tokens` are promised, `num_cached_tokens` of them computed and held by now."""

    pin_id: str
    owner: str
    tenant: str
    priority: int
    ttl_seconds: float
    num_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Refusal:
    sequence_id: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Update:
    """One driver step's changes, applied in the order of the fields, each entry on its own.

    `num_spare_blocks` must stay available after each of `resumes` and `opens`.
    """

    commits: Sequence[CommitPlan] = ()
    forks: Sequence[ForkPlan] = ()
    closes: Sequence[str] = ()
    truncates: Sequence[TruncatePlan] = ()
    suspends: Sequence[SuspendPlan] = ()
    extends: Sequence[ExtendPlan] = ()
    resumes: Sequence[str] = ()
    opens: Sequence[OpenPlan] = ()
    num_spare_blocks: int = 0
    runs_copies: bool = False  # the driver runs the copies that answers ask for
    # What it has done since the last update; see PageManager.complete_transfer and
    # PageManager.observe_prefill.
    completed_transfer: int = 0
    transfer_seconds: float = 0.0
    num_prefill_tokens: int = 0
    prefill_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Copies are run in this order, before any write: `copies`, then those of the sequences
    in `extended`, in `resumed` and in `opened`.

    When all copies of this answer were run, the driver says so by the number `transfer`;
    it is 0 if there are none but those of extensions. `num_available_blocks` of the page
    pool are free, or cached and may be evicted, after the update.
    """

    extended: list[ExtendedSequence]
    opened: list[OpenedSequence]
    refused: list[Refusal]
    copies: list[BlockCopy] = field(default_factory=list)
    transfer: int = 0
    forked: list[ForkedSequence] = field(default_factory=list)
    suspended: list[SuspendedSequence] = field(default_factory=list)
    resumed: list[ResumedSequence] = field(default_factory=list)
    num_available_blocks: int = 0


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    sequence_id: str
    length: int
    num_computed_tokens: int
    block_ids: list[BlockId]
    tokens: Sequence[int] = ()  # only if asked for
    driver_state: bytes = b""
    is_suspended: bool = False
    group: str = ""
    is_driven: bool = False


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counters at one instant. num_free + num_cached + num_held == num_blocks.

    `num_pinned` are those held by pins, and maybe by others too. `evictions`: blocks
    whose KV was given up, by cause.
    """

    num_blocks: int = 0
    num_free: int = 0
    num_cached: int = 0
    num_held: int = 0
    num_pinned: int = 0
    num_sequences: int = 0
    num_suspended: int = 0
    num_pins: int = 0
    num_waste_slots: int = 0
    waste_ratio: float = 0.0
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_evictions: int = 0
    evictions: Mapping[str, int] = field(default_factory=dict)
    num_host_blocks: int = 0
    num_host_free: int = 0
    num_host_cached: int = 0
    num_host_evictions: int = 0
    num_demotions: int = 0
    prefill_tokens_per_s: float = 0.0
    host_bytes_per_s: float = 0.0
    swap: SwapStats = field(default_factory=SwapStats)
    tenants: Sequence[TenantUsage] = ()
    num_audits: int = 0
    num_findings: int = 0  # of all those audits
    is_journal_whole: bool = True  # False: there was no room for it; a kill loses everything


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that an audit found wrong, about what, and in words."""

    kind: str
    text: str
