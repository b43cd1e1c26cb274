"""The block tables of all open sequences over one pool."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from kvstore import audit
from kvstore.block_pool import BlockPool
from kvstore.errors import (
    InvalidCommit,
    InvalidRequest,
    OutOfBlocks,
    PromptExceedsPool,
    SequenceExists,
    SequenceNotFound,
)
from kvstore.prefix_tree import Chain
from kvstore.sequences import Sequence, check_commit, check_id, check_plan
from kvstore.types import (
    BlockId,
    CommitPlan,
    ExtendedSequence,
    ExtendPlan,
    ForkedSequence,
    ForkPlan,
    OpenedSequence,
    OpenPlan,
    PoolStats,
    SequenceInfo,
    TruncatePlan,
)


@dataclass(frozen=True, slots=True)
class _Opening:
    """A checked plan and what it takes: blocks to share, blocks to allocate."""

    plan: OpenPlan
    prompt: array[int]
    chain: Chain
    hits: array[int]
    num_new_blocks: int


class PageTables:
    """Which sequence holds which blocks. A call that fails leaves everything unchanged."""

    def __init__(self, num_blocks: int, block_size: int, eviction: str) -> None:
        self._blocks = BlockPool(num_blocks, block_size, eviction)
        self._block_size = block_size
        self._sequences: dict[str, Sequence] = {}  # in the order of opening
        self._num_opened = 0
        self._num_waste_slots = 0
        self._num_prompt_tokens = 0
        self._num_hit_tokens = 0

    def open(self, plans: Iterable[OpenPlan], epoch: int) -> list[OpenedSequence]:
        """See PageManager.open_sequences. `epoch` of the driver, 0 for other clients."""
        openings: dict[str, _Opening] = {}
        answers: list[OpenedSequence | str] = []  # or the id of an opening
        for plan in plans:
            prompt = check_plan(plan)
            sequence = self._sequences.get(plan.sequence_id)
            if sequence is not None:
                answers.append(self._reopened(sequence, plan, prompt))
                continue
            first = openings.setdefault(plan.sequence_id, self._prepare(plan, prompt))
            if (first.prompt, first.plan.namespace) != (prompt, plan.namespace):
                raise SequenceExists(plan.sequence_id)
            answers.append(plan.sequence_id)
        self._check_room(list(openings.values()))
        opened = self._open_all(list(openings.values()), epoch)
        return [opened[entry] if isinstance(entry, str) else entry for entry in answers]

    def fork(self, plans: Iterable[ForkPlan]) -> list[ForkedSequence]:
        """See PageManager.fork_sequences."""
        plans = list(plans)
        made: set[str] = set()
        for plan in plans:
            check_id(plan.sequence_id)
            if plan.source_id not in made:
                self._find(plan.source_id)
            if plan.sequence_id in made or plan.sequence_id in self._sequences:
                raise SequenceExists(plan.sequence_id)
            made.add(plan.sequence_id)
        return [self._fork(self._sequences[p.source_id], p.sequence_id) for p in plans]

    def extend(self, plans: Iterable[ExtendPlan]) -> list[ExtendedSequence]:
        """See PageManager.extend_sequences."""
        size, sequences = self._block_size, self._sequences
        lengths: dict[str, int] = {}
        growths: list[tuple[Sequence, int, bool]] = []  # blocks to add, one of them a copy
        copied: Counter[BlockId] = Counter()
        num_needed = num_tokens = 0
        for plan in plans:
            sequence_id, length = plan.sequence_id, plan.length
            sequence = sequences.get(sequence_id)
            if sequence is None:
                raise SequenceNotFound(sequence_id)
            before = lengths.get(sequence_id, sequence.length)
            if length <= before:
                continue
            lengths[sequence_id] = length
            num_tokens += length - before
            count = (length - 1) // size - (before - 1) // size
            copies = False
            if sequence.may_share_tail and before == sequence.length:
                copies = self._copies_tail(sequence, copied)
            if count or copies:
                num_needed += count + copies
                growths.append((sequence, count + copies, copies))
        new = self._blocks.allocate(num_needed) if num_needed else array("i")
        answers = []
        at = 0
        for sequence, count, copies in growths:
            answers.append(self._grow(sequence, new[at : at + count], copies))
            at += count
        for sequence_id, length in lengths.items():
            sequence = sequences[sequence_id]
            sequence.length = length
            sequence.may_share_tail = False
        self._num_waste_slots += (num_needed - copied.total()) * size - num_tokens
        return answers

    def truncate(self, plans: Iterable[TruncatePlan]) -> None:
        """See PageManager.truncate_sequences."""
        plans = list(plans)
        for plan in plans:
            limit = self._find(plan.sequence_id).length
            if not 1 <= plan.length <= limit:
                raise InvalidRequest("length", f"{plan.length} is not from 1 to {limit}")
        for plan in plans:
            self._truncate(self._sequences[plan.sequence_id], plan.length)

    def commit(self, plans: Iterable[CommitPlan]) -> None:
        """See PageManager.commit_blocks."""
        checked: dict[str, tuple[Sequence, CommitPlan, array[int]]] = {}
        for plan in plans:
            if plan.sequence_id in checked:
                raise InvalidCommit("sequence_id", f"{plan.sequence_id!r} is listed twice")
            sequence = self._find(plan.sequence_id)
            checked[plan.sequence_id] = (sequence, plan, check_commit(sequence, plan))
        for sequence, plan, new_tokens in checked.values():
            self._commit(sequence, plan.num_computed_tokens, new_tokens)

    def close(self, sequence_ids: Iterable[str]) -> None:
        """See PageManager.close_sequences."""
        for sequence_id in sequence_ids:
            sequence = self._sequences.pop(sequence_id, None)
            if sequence is not None:
                self._num_waste_slots -= self._waste(sequence)
                self._blocks.release(sequence.chain, sequence.block_ids)

    def close_driven(self) -> int:
        """Close all sequences that drivers opened; how many there were."""
        ids = [sequence.sequence_id for sequence in self._sequences.values() if sequence.epoch]
        self.close(ids)
        return len(ids)

    def page(self, size: int, first_serial: int) -> tuple[list[SequenceInfo], int | None]:
        """Up to `size` sequences from a serial on, and the serial of the next, if any."""
        rest = (s for s in self._sequences.values() if s.serial >= first_serial)
        infos = [
            SequenceInfo(s.sequence_id, s.length, s.num_computed, s.block_ids.tolist())
            for s in islice(rest, size)
        ]
        following = next(rest, None)
        return infos, None if following is None else following.serial

    def is_open(self, sequence_id: str) -> bool:
        return sequence_id in self._sequences

    def stats(self) -> PoolStats:
        """The counters at this instant."""
        frames = self._blocks.frames
        num_held_slots = frames.num_held * self._block_size
        return PoolStats(
            num_blocks=frames.num_blocks,
            num_free=frames.num_free,
            num_cached=frames.num_cached,
            num_held=frames.num_held,
            num_sequences=len(self._sequences),
            num_waste_slots=self._num_waste_slots,
            waste_ratio=self._num_waste_slots / num_held_slots if num_held_slots else 0.0,
            num_prompt_tokens=self._num_prompt_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_evictions=self._blocks.num_evictions,
        )

    def audit(self) -> list[str]:
        """See PageManager.audit."""
        sequences = list(self._sequences.values())
        findings = audit.pool_findings(self._blocks)
        findings += audit.sequence_findings(self._blocks, sequences, self._block_size)
        waste = sum(self._waste(sequence) for sequence in sequences)
        if waste != self._num_waste_slots:
            findings.append(f"waste is {waste} slots, counted {self._num_waste_slots}")
        return findings

    def _find(self, sequence_id: str) -> Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise SequenceNotFound(sequence_id)
        return sequence

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _waste(self, sequence: Sequence) -> int:
        return len(sequence.block_ids) * self._block_size - sequence.length

    def _prepare(self, plan: OpenPlan, prompt: array[int]) -> _Opening:
        num_blocks = self._num_blocks(len(prompt))
        total = self._blocks.frames.num_blocks
        if num_blocks > total:
            raise PromptExceedsPool(needed=num_blocks, total=total)
        # One token must be left to compute: its logits are what the prompt is for.
        num_full = (len(prompt) - 1) // self._block_size
        data = prompt[: num_full * self._block_size].tobytes()
        chain, hits = self._blocks.match(plan.namespace, data)
        return _Opening(plan, prompt, chain, hits, num_blocks - len(hits))

    def _check_room(self, openings: list[_Opening]) -> None:
        """Raises OutOfBlocks unless the openings fit beside all of their hits."""
        needed = sum(opening.num_new_blocks for opening in openings)
        free = self._blocks.num_available - self._blocks.count_unheld([o.hits for o in openings])
        if needed > free:
            raise OutOfBlocks(needed=needed, free=free)

    def _open_all(self, openings: list[_Opening], epoch: int) -> dict[str, OpenedSequence]:
        # Every hit is held before anything is allocated, or one plan's allocation could
        # evict another's hits.
        for opening in openings:
            self._blocks.hold(opening.hits)
        opened = {}
        for opening in openings:
            num_cached = len(opening.hits) * self._block_size
            sequence = Sequence(
                sequence_id=opening.plan.sequence_id,
                serial=self._num_opened,
                tokens=opening.prompt,
                num_prompt_tokens=len(opening.prompt),
                num_cached_tokens=num_cached,
                block_ids=opening.hits + self._blocks.allocate(opening.num_new_blocks),
                length=len(opening.prompt),
                num_computed=num_cached,
                chain=opening.chain,
                epoch=epoch,
            )
            self._sequences[sequence.sequence_id] = sequence
            self._num_opened += 1
            self._num_prompt_tokens += sequence.num_prompt_tokens
            self._num_hit_tokens += num_cached
            self._num_waste_slots += self._waste(sequence)
            opened[sequence.sequence_id] = self._answer(sequence)
        return opened

    def _answer(self, sequence: Sequence) -> OpenedSequence:
        table = sequence.block_ids[: self._num_blocks(sequence.num_prompt_tokens)]
        return OpenedSequence(sequence.sequence_id, table.tolist(), sequence.num_cached_tokens)

    def _reopened(self, sequence: Sequence, plan: OpenPlan, prompt: array[int]) -> OpenedSequence:
        if not sequence.is_opened_by(plan, prompt):
            raise SequenceExists(plan.sequence_id)
        return self._answer(sequence)

    def _fork(self, source: Sequence, sequence_id: str) -> ForkedSequence:
        # Slots beyond the known tokens are promised to the source alone.
        length = min(source.length, len(source.tokens))
        table = source.block_ids[: self._num_blocks(length)]
        sequence = Sequence(
            sequence_id=sequence_id,
            serial=self._num_opened,
            tokens=source.tokens[:],
            num_prompt_tokens=source.num_prompt_tokens,
            num_cached_tokens=source.num_cached_tokens,
            block_ids=table,
            length=length,
            num_computed=source.num_computed,
            chain=self._blocks.share(source.chain, table),
            epoch=source.epoch,
            may_share_tail=True,
            num_forked_blocks=len(table),
        )
        source.may_share_tail = True
        source.num_forked_blocks = max(source.num_forked_blocks, len(table))
        self._sequences[sequence_id] = sequence
        self._num_opened += 1
        self._num_waste_slots += self._waste(sequence)
        return ForkedSequence(sequence_id, table.tolist(), length, sequence.num_computed)

    def _copies_tail(self, sequence: Sequence, copied: Counter[BlockId]) -> bool:
        """Whether the next slot is in a block that others read; counts it then.

        The last of those who share a block writes to it: by then it is the sole owner,
        unless the block can be found by its prefix.
        """
        if sequence.length % self._block_size == 0:
            return False
        tail = sequence.block_ids[-1]
        frames = self._blocks.frames
        if not frames.findable[tail] and frames.ref_counts[tail] - copied[tail] <= 1:
            return False
        copied[tail] += 1
        return True

    def _grow(self, sequence: Sequence, new: array[int], copies: bool) -> ExtendedSequence:
        first_index = len(sequence.block_ids)
        if not copies:
            sequence.block_ids.extend(new)
            return ExtendedSequence(sequence.sequence_id, first_index, new.tolist())
        old = sequence.block_ids.pop()
        sequence.block_ids.extend(new)
        self._blocks.cut(sequence.chain, first_index - 1, array("i", [old]), first_index - 1)
        return ExtendedSequence(sequence.sequence_id, first_index - 1, new.tolist(), old)

    def _truncate(self, sequence: Sequence, length: int) -> None:
        keep = self._num_blocks(length)
        self._num_waste_slots -= self._waste(sequence)
        cut = sequence.block_ids[keep:]
        del sequence.block_ids[keep:]
        del sequence.tokens[length:]
        sequence.num_forked_blocks = min(sequence.num_forked_blocks, keep)
        sequence.length = length
        sequence.num_computed = min(sequence.num_computed, length)
        sequence.num_prompt_tokens = min(sequence.num_prompt_tokens, length)
        sequence.num_cached_tokens = min(sequence.num_cached_tokens, length)
        # The chain may still cover a block that is cut within, until its copy replaces it.
        self._blocks.cut(sequence.chain, keep, cut, keep)
        sequence.may_share_tail = True
        self._num_waste_slots += self._waste(sequence)

    def _commit(self, sequence: Sequence, num_computed: int, new_tokens: array[int]) -> None:
        sequence.tokens.extend(new_tokens)
        sequence.num_computed = max(sequence.num_computed, num_computed)
        num_full = sequence.num_computed // self._block_size
        self._blocks.refresh(sequence.chain)
        first = sequence.chain.num_blocks
        if num_full > first:
            tokens = sequence.tokens[first * self._block_size : num_full * self._block_size]
            blocks = sequence.block_ids[first:num_full]
            self._blocks.register(sequence.chain, blocks, tokens.tobytes())
