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
    only to positions below num_slots.
    """

    request: GenerationRequest
    max_length: int  # prompt and answer
    token_ids: list[int]

    # The rest belongs to one opening; `forget` starts afresh.
    id: str = ""
    block_ids: list[int] = field(default_factory=list)
    num_slots: int = 0  # granted by the kvstore
    num_computed: int = 0  # leading tokens whose KV finished steps have written
    num_committed: int = 0  # those of them that the kvstore was told of
    num_told: int = 0  # leading tokens that the kvstore knows
    chunk: Chunk | None = None  # in the step under way
    num_blocks_sent: int | None = None  # that compute knows; None: it knows nothing
    is_ended: bool = False

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_pending(self) -> int:
        """Known tokens without KV; 1 when decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def lacks_slots(self) -> bool:
        return self.num_slots < len(self.token_ids)

    def forget(self) -> None:
        """Give up the opening, keep the tokens."""
        self.id, self.block_ids = "", []
        self.num_slots = self.num_computed = self.num_committed = self.num_told = 0
        self.chunk = self.num_blocks_sent = None

    def open_with(self, block_ids: list[int], num_cached_tokens: int) -> None:
        self.block_ids = list(block_ids)
        self.num_slots = self.num_told = len(self.token_ids)
        self.num_computed = self.num_committed = num_cached_tokens

    def next_chunk(self, budget: int) -> Chunk | None:
        """The next tokens to compute, at most `budget`; None if none may be written."""
        start = self.num_computed
        num_tokens = min(self.num_slots, len(self.token_ids), start + budget) - start
        if num_tokens <= 0:
            return None
        return Chunk(self.id, start, num_tokens, start + num_tokens == len(self.token_ids))

    def next_length(self, block_size: int) -> int | None:
        """Slots to ask for now, so that the step after this one can write.

        None if there are enough, or if the token under way is the last. Whole blocks
        are asked for, so that one request serves block_size steps.
        """
        samples = self.chunk is not None and self.chunk.sample
        needed = len(self.token_ids) + samples
        if needed <= self.num_slots or needed >= self.max_length:
            return None
        return min(-(-needed // block_size) * block_size, self.max_length - 1)

    def take_commit(self, block_size: int) -> CommitPlan | None:
        """What to tell the kvstore of blocks filled since the last time."""
        num_full = self.num_computed // block_size * block_size
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
            self.id, tuple(self.token_ids), tuple(self.block_ids), self.request.sampling
        )

    def take_extension(self) -> TableExtension | None:
        """Blocks that compute does not know yet, after the first time."""
        first = self.num_blocks_sent
        if first is None or first == len(self.block_ids):
            return None
        self.num_blocks_sent = len(self.block_ids)
        return TableExtension(self.id, first, tuple(self.block_ids[first:]))
