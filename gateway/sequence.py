"""One token list of a request on its way through the pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.ports import (
    Chunk,
    CommitPlan,
    OpenedSequence,
    ResumedSequence,
    SamplingOptions,
    SequenceState,
    TableExtension,
)

if TYPE_CHECKING:
    from gateway.group import SequenceGroup


@dataclass(slots=True, eq=False)
class Sequence:
    """One token list with a block table.

    It has a table from `open_with`, `resume_with` or `fork_with` to `forget`.

    Invariant: num_committed <= num_computed <= len(token_ids), and KV is written
    only to positions below num_slots, the size of the blocks in the table.
    """

    group: SequenceGroup
    index: int  # of the continuation
    token_ids: list[int]
    sampling: SamplingOptions
    is_ended: bool = False

    # The rest belongs to one opening; `forget` starts afresh.
    id: str = ""
    block_ids: list[int] = field(default_factory=list)
    num_slots: int = 0
    length: int = 0  # tokens that the kvstore has made room for
    num_computed: int = 0  # leading tokens whose KV finished steps have written
    num_committed: int = 0  # those of them that the kvstore was told of
    num_told: int = 0  # leading tokens that the kvstore knows
    chunk: Chunk | None = None  # in the step under way
    num_known: int = 0  # leading tokens that compute knows
    num_blocks_sent: int | None = None  # that compute knows; None: it knows nothing
    changed_block: int | None = None  # index in the table of one that compute knows as another
    refusal: str = ""  # why it has no more room; empty: it was not refused any

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.group.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Known tokens without KV; 1 when decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_pending_after_step(self) -> int:
        """The same when the step under way has ended, if its guesses are wrong."""
        chunk = self.chunk
        if chunk is None:
            return self.num_pending
        return self.num_pending - (chunk.num_tokens - chunk.num_drafts - chunk.sample)

    @property
    def lacks_slots(self) -> bool:
        """It was refused the room that its known tokens need.

        A beam is always told what it may write, since any block of it may be shared.
        """
        if not self.refusal:
            return False
        room = self.num_slots if self.group.beams is None else self.length
        return room < len(self.token_ids)

    def forget(self) -> None:
        """Give up the opening, keep the tokens."""
        self.id, self.num_told = "", 0
        self.leave_pool()

    def leave_pool(self) -> None:
        """The same, but the kvstore keeps what it knows, under the same id."""
        self.block_ids = []
        self.num_slots = self.length = self.num_known = 0
        self.num_computed = self.num_committed = 0
        self.chunk = self.num_blocks_sent = self.changed_block = None
        self.refusal = ""

    def open_with(self, opened: OpenedSequence, block_size: int) -> None:
        self._begin(opened.block_ids, opened.num_cached_tokens, len(self.token_ids), block_size)

    def resume_with(self, resumed: ResumedSequence, block_size: int) -> None:
        self._begin(resumed.block_ids, resumed.num_computed_tokens, self.num_told, block_size)

    def fork_with(self, block_ids: list[int], length: int, block_size: int) -> None:
        """It shares the blocks of its first `length` tokens, all of them computed."""
        self._begin(block_ids, length, length, block_size)
        # A block that is not full is not its own before there is an answer to its first
        # extension: until then it may be the copy that it gets.
        self.num_slots = length

    def _begin(
        self, block_ids: list[int], num_computed: int, num_told: int, block_size: int
    ) -> None:
        self.grow(0, block_ids, block_size)
        self.length = self.num_told = num_told
        self.num_computed = self.num_committed = num_computed

    def grow(self, first_index: int, block_ids: list[int], block_size: int) -> None:
        """`block_ids` stand in the table from `first_index` on, to its end."""
        if self.num_blocks_sent is not None and first_index < self.num_blocks_sent:
            self.changed_block = first_index
        self.block_ids[first_index:] = block_ids
        self.num_slots = len(self.block_ids) * block_size

    def grant(self, length: int, block_size: int) -> None:
        """The kvstore has made room for `length` tokens."""
        self.length = length
        self.num_slots = len(self.block_ids) * block_size
        self.refusal = ""

    def cut_room(self, length: int, block_size: int) -> None:
        """Give up the slots behind `length` tokens."""
        self.length = length
        del self.block_ids[-(-length // block_size) :]
        self.num_slots = len(self.block_ids) * block_size
        if self.num_blocks_sent is not None:
            self.num_blocks_sent = min(self.num_blocks_sent, len(self.block_ids))

    def next_chunk(self, budget: int, drafts: tuple[int, ...] = (), num_drafts: int = 0) -> Chunk:
        """The next tokens to compute, at most `budget` of those that have a slot, at least 1.

        Guesses only for a sequence that decodes, within its slots and the budget.
        """
        start, num_tokens = self.num_computed, len(self.token_ids)
        end = min(self.num_slots, num_tokens, start + budget)
        given: tuple[int, ...] = ()
        if self.num_blocks_sent is not None and self.num_known < num_tokens:
            given = tuple(self.token_ids[self.num_known :])
        self.num_known = num_tokens
        num_drafts = num_drafts or len(drafts)
        return Chunk(
            self.id,
            start,
            end - start + num_drafts,
            end == num_tokens,
            given + drafts,
            num_drafts,
        )

    def length_needed(self, num_ahead: int) -> int:
        """Tokens that need a slot in the step after this one, with so many guesses."""
        chunk = self.chunk
        needed = len(self.token_ids) + num_ahead
        if chunk is not None and chunk.sample:
            needed += 1 + chunk.num_drafts
        # The KV of the last token of all is never needed.
        return min(needed, max(self.group.max_length - 1, len(self.token_ids)))

    def take_commit(self, block_size: int, *, whole: bool = False) -> CommitPlan | None:
        """What to tell the kvstore of blocks filled since the last time.

        `whole`: of the block that is not full, too.
        """
        num_done = min(self.num_computed, self.length)
        if not whole:
            num_done -= num_done % block_size
        if num_done <= self.num_committed:
            return None
        start = self.num_told
        self.num_committed = num_done
        self.num_told = max(start, num_done)
        return CommitPlan(self.id, num_done, start, tuple(self.token_ids[start:num_done]))

    def take_state(self) -> SequenceState | None:
        """All of it for compute, the first time."""
        if self.num_blocks_sent is not None:
            return None
        self.num_blocks_sent = len(self.block_ids)
        self.changed_block = None
        return SequenceState(
            self.id,
            tuple(self.token_ids),
            tuple(self.block_ids),
            self.sampling,
            self.group.log_id,
            self.group.num_prompt_tokens,
        )

    def take_extension(self) -> TableExtension | None:
        """Blocks that compute does not know yet, after the first time."""
        first = self.num_blocks_sent
        if first is None:
            return None
        if self.changed_block is not None:
            first, self.changed_block = self.changed_block, None
        elif first == len(self.block_ids):
            return None
        self.num_blocks_sent = len(self.block_ids)
        return TableExtension(self.id, first, tuple(self.block_ids[first:]))
