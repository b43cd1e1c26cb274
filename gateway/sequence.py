"""A request's tokens on their way through the pool."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.ports import Chunk, CommitPlan, SequenceState, TableExtension
from gateway.types import GenerationRequest


@dataclass(slots=True, eq=False)
class Sequence:
    """One token list with a block table.

    Waiting (no id) -> opening -> running -> ended; a preempted one waits again with
    the tokens it has.

    Invariant: num_committed <= num_computed <= len(token_ids), and KV is written
    only to positions below num_slots, the size of the blocks in the table.
    """

    request: GenerationRequest
    max_length: int  # prompt and answer
    token_ids: list[int]
    num_losses: int = 0  # times that the workers were lost with it since its last token
    was_preempted: bool = False

    # The rest belongs to one opening; `forget` starts afresh.
    id: str = ""
    block_ids: list[int] = field(default_factory=list)
    num_slots: int = 0
    length: int = 0  # tokens that the kvstore has made room for
    num_computed: int = 0  # leading tokens whose KV finished steps have written
    num_committed: int = 0  # those of them that the kvstore was told of
    num_told: int = 0  # leading tokens that the kvstore knows
    chunk: Chunk | None = None  # in the step under way
    num_blocks_sent: int | None = None  # that compute knows; None: it knows nothing
    is_ended: bool = False

    @property
    def log_id(self) -> str:
        return self.request.log_id or self.request.request_id

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_pending(self) -> int:
        """Known tokens without KV; 1 when decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_pending_after_step(self) -> int:
        """The same when the step under way has ended."""
        chunk = self.chunk
        return self.num_pending - (chunk.num_tokens - chunk.sample if chunk else 0)

    @property
    def lacks_slots(self) -> bool:
        return self.num_slots < len(self.token_ids)

    def forget(self) -> None:
        """Give up the opening, keep the tokens."""
        self.id, self.block_ids = "", []
        self.num_slots = self.length = 0
        self.num_computed = self.num_committed = self.num_told = 0
        self.chunk = self.num_blocks_sent = None

    def open_with(self, block_ids: list[int], num_cached_tokens: int, block_size: int) -> None:
        self.grow(0, block_ids, block_size)
        self.length = self.num_told = len(self.token_ids)
        self.num_computed = self.num_committed = num_cached_tokens

    def grow(self, first_index: int, block_ids: list[int], block_size: int) -> None:
        """`block_ids` stand in the table from `first_index` on."""
        self.block_ids[first_index:] = block_ids
        self.num_slots = len(self.block_ids) * block_size

    def next_chunk(self, budget: int) -> Chunk | None:
        """The next tokens to compute, at most `budget`; None if none may be written."""
        start = self.num_computed
        num_tokens = min(self.num_slots, len(self.token_ids), start + budget) - start
        if num_tokens <= 0:
            return None
        return Chunk(self.id, start, num_tokens, start + num_tokens == len(self.token_ids))

    def next_length(self) -> int | None:
        """Room to ask for now, so that the step after this one can write.

        None if there is enough, or if the token under way is the last.
        """
        samples = self.chunk is not None and self.chunk.sample
        needed = len(self.token_ids) + samples
        return needed if self.length < needed < self.max_length else None

    def take_commit(self, block_size: int) -> CommitPlan | None:
        """What to tell the kvstore of blocks filled since the last time."""
        num_full = min(self.num_computed, self.length) // block_size * block_size
        if num_full <= self.num_committed:
            return None
        start = self.num_told
        plan = CommitPlan(self.id, num_full, start, tuple(self.token_ids[start:num_full]))
        self.num_committed = num_full
        self.num_told = max(start, num_full)
        return plan

    def take_state(self) -> SequenceState | None:
        """All of it for compute, the first time."""
        if self.num_blocks_sent is not None:
            return None
        self.num_blocks_sent = len(self.block_ids)
        return SequenceState(
            self.id,
            tuple(self.token_ids),
            tuple(self.block_ids),
            self.request.sampling,
            self.log_id,
        )

    def take_extension(self) -> TableExtension | None:
        """Blocks that compute does not know yet, after the first time."""
        first = self.num_blocks_sent
        if first is None or first == len(self.block_ids):
            return None
        self.num_blocks_sent = len(self.block_ids)
        return TableExtension(self.id, first, tuple(self.block_ids[first:]))
