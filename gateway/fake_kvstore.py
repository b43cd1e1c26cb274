"""A page manager for tests: it allocates real blocks and refuses what the contract refuses.

Whoever uses a block before it was granted, writes to a shared one, or runs copies in another
order than that of the answers, is found out by `FakeCompute`, which reads what it wrote.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeVar

from gateway.errors import PinRefused, WorkerUnavailable
from gateway.fake_blocks import FakeBlocks, FakeSequence, NoRoom
from gateway.fake_resume import num_blocks_of, resume_group
from gateway.ports import (
    BlockCopy,
    CommitPlan,
    ExtendedSequence,
    ExtendPlan,
    ForkedSequence,
    ForkPlan,
    OpenedSequence,
    OpenPlan,
    PinPlan,
    Refusal,
    SuspendedSequence,
    TruncatePlan,
    Update,
    UpdateResult,
)

T = TypeVar("T")


class ContractBroken(Exception):
    """The driver did what the contracts forbid."""


class _Refused(Exception):
    """An entry of an update is refused, for this reason. It changed nothing."""


class FakeKvStore:
    """The page manager's contract over a list of free blocks and a dict of prefixes.

    It has no clock: pins last until they are unpinned, or until only pins are in the way of
    a sequence. Set `is_down` to make it unreachable.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        host_blocks: int = 0,
        frees_late: int = 0,
        most_pinned: int | None = None,
    ) -> None:
        """`host_blocks`: room for what suspended sequences have computed; 0: it is lost.

        `frees_late`: blocks that closed or suspended sequences give back are not free before
        so many updates later. `most_pinned`: blocks that pins may be for; None: half of all.
        """
        self.num_blocks, self.block_size = num_blocks, block_size
        self.host_blocks, self.frees_late = host_blocks, frees_late
        self.most_pinned = num_blocks // 2 if most_pinned is None else most_pinned
        self.is_down = False
        self.updates: list[Update] = []
        self.sequences: dict[str, FakeSequence] = {}
        self.pins: dict[str, PinPlan] = {}
        self._pinned: dict[str, list[int]] = {}  # blocks that each of them holds
        self._blocks = FakeBlocks(num_blocks, block_size)
        self._free = self._blocks.free
        self._host_free = deque(range(num_blocks, num_blocks + host_blocks))
        self._transfer = 1  # the next one
        self._completed = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those among them that are late."""
        return len(self._blocks.free) + len(self._blocks.late)

    @property
    def num_host_free(self) -> int:
        return len(self._host_free)

    def restart(self) -> None:
        """Lose everything, as a new process would."""
        self.__init__(  # type: ignore[misc]
            self.num_blocks,
            self.block_size,
            host_blocks=self.host_blocks,
            frees_late=self.frees_late,
            most_pinned=self.most_pinned,
        )

    # --- the port -------------------------------------------------------------

    async def become_driver(self, driver_id: str) -> None:  # noqa: ARG002 - for a log
        await self._reach()
        self._close_all()

    async def resign(self) -> None:
        await self._reach()
        self._close_all()

    async def update_sequences(self, update: Update) -> UpdateResult:
        await self._reach()
        return self.apply(update)

    async def pin_prefix(self, plan: PinPlan) -> None:
        await self._reach()
        if plan.pin_id in self.pins:
            return
        pins = [*self.pins.values(), plan]
        if sum(len(pin.token_ids) // self.block_size for pin in pins) > self.most_pinned:
            raise PinRefused(f"pins may have {self.most_pinned} blocks", pin_id=plan.pin_id)
        self.pins[plan.pin_id], self._pinned[plan.pin_id] = plan, []
        self._advance_pins()

    async def unpin(self, pin_id: str) -> None:
        await self._reach()
        if self.pins.pop(pin_id, None):
            self._blocks.release(self._pinned.pop(pin_id))

    async def close(self) -> None:
        await asyncio.sleep(0)

    async def _reach(self) -> None:
        await asyncio.sleep(0)
        if self.is_down:
            raise WorkerUnavailable("the fake kvstore is down")

    def _close_all(self) -> None:
        for sequence_id in list(self.sequences):
            self._close(sequence_id)
        self._blocks.tick(self.frees_late)

    # --- an update ------------------------------------------------------------

    def apply(self, update: Update) -> UpdateResult:
        """One update, at once. Raises ContractBroken."""
        if not update:
            raise ContractBroken("an empty update")
        if update.completed_transfer >= self._transfer:
            raise ContractBroken(f"transfer {update.completed_transfer} was never given out")
        self._completed = max(self._completed, update.completed_transfer)
        self.updates.append(update)
        self._blocks.tick()
        result = UpdateResult([], [], [])
        _each(update.commits, self._commit, result)
        _each(update.forks, self._fork, result)
        for sequence_id in update.closes:
            self._close(sequence_id, self.frees_late)
        _each(update.truncates, self._truncate, result)
        _each(update.suspends, self._suspend, result)
        _each(update.extends, self._extend, result)
        self._resume_and_open(update, result)
        has_copies = bool(result.copies)
        has_copies |= any(one.copies for one in result.resumed)
        has_copies |= any(one.copies for one in result.opened)
        self._transfer += has_copies
        return UpdateResult(
            extended=result.extended,
            opened=result.opened,
            refused=result.refused,
            copies=result.copies,
            transfer=self._transfer - 1 if has_copies else 0,
            forked=result.forked,
            suspended=result.suspended,
            resumed=result.resumed,
            num_available_blocks=len(self._free),
        )

    def _commit(self, plan: CommitPlan, result: UpdateResult) -> None:  # noqa: ARG002
        entry = self._resident(plan.sequence_id)
        known = entry.token_ids
        overlap = known[plan.token_start : plan.token_start + len(plan.token_ids)]
        if plan.token_start > len(known) or list(plan.token_ids[: len(overlap)]) != overlap:
            raise ContractBroken(f"commit of other tokens: {plan}")
        known += plan.token_ids[len(overlap) :]
        if plan.num_computed_tokens > min(entry.length, len(known)):
            raise ContractBroken(f"commit beyond the sequence: {plan}")
        entry.num_computed = max(entry.num_computed, plan.num_computed_tokens)
        self._give_host_back(entry)
        for index in range(entry.num_computed // self.block_size):
            key = self._blocks.key(entry.namespace, known, index)
            self._blocks.remember(entry.block_ids[index], key)
        self._advance_pins()

    def _fork(self, plan: ForkPlan, result: UpdateResult) -> None:
        source = self._resident(plan.source_id)
        if plan.sequence_id in self.sequences:
            raise _Refused("SEQUENCE_EXISTS")
        tokens = source.token_ids[: plan.length or None]
        if len(tokens) < plan.length:
            raise ContractBroken(f"a fork with unknown tokens: {plan}")
        length = min(source.length, len(tokens))
        table = source.block_ids[: self._blocks.num_for(length)]
        self._blocks.hold(table)
        fork = FakeSequence(
            plan.sequence_id,
            tokens,
            source.namespace,
            source.group_id,
            table,
            length,
            min(source.num_computed, length),
        )
        self.sequences[plan.sequence_id] = fork
        result.forked.append(ForkedSequence(plan.sequence_id, list(table), fork.num_computed))

    def _close(self, sequence_id: str, num_late: int = 0) -> None:
        entry = self.sequences.pop(sequence_id, None)
        if entry is not None:
            self._blocks.release(entry.block_ids, num_late)
            self._give_host_back(entry)

    def _truncate(self, plan: TruncatePlan, result: UpdateResult) -> None:  # noqa: ARG002
        entry = self._resident(plan.sequence_id)
        if not 1 <= plan.length <= entry.length:
            raise ContractBroken(f"a cut beyond the sequence: {plan}")
        keep = self._blocks.num_for(plan.length)
        self._blocks.release(entry.block_ids[keep:])
        del entry.block_ids[keep:], entry.token_ids[plan.length :]
        entry.length = plan.length
        entry.num_computed = min(entry.num_computed, plan.length)

    def _suspend(self, sequence_id: str, result: UpdateResult) -> None:
        if any(one.sequence_id == sequence_id for one in result.suspended):
            return
        for entry in self._group(self._resident(sequence_id)):
            self._give_host_back(entry)
            computed = entry.block_ids[: self._blocks.num_for(entry.num_computed)]
            if computed and len(computed) <= len(self._host_free):
                entry.host_ids = [self._host_free.popleft() for _ in computed]
                entry.transfer = self._transfer
                result.copies.extend(map(BlockCopy, computed, entry.host_ids))
            before = self.num_free
            self._blocks.release(entry.block_ids, self.frees_late)
            num_freed = self.num_free - before
            entry.block_ids, entry.length, entry.is_suspended = [], 0, True
            result.suspended.append(
                SuspendedSequence(entry.sequence_id, num_freed, is_swapped=bool(entry.host_ids))
            )

    def _extend(self, plan: ExtendPlan, result: UpdateResult) -> None:
        entry = self._resident(plan.sequence_id)
        table = entry.block_ids
        if plan.length <= entry.length:
            return
        is_partial = entry.length % self.block_size > 0
        copied = table[-1:] if is_partial and self._blocks.is_shared(table[-1]) else []
        num_new = self._blocks.num_for(plan.length) - len(table) + len(copied)
        self._blocks.check_room(num_new)
        new = [self._blocks.take() for _ in range(num_new)]
        entry.length = plan.length
        if copied:
            self._blocks.release([table.pop()])
            entry.num_computed = min(entry.num_computed, len(table) * self.block_size)
        if new:
            copies = list(map(BlockCopy, copied, new))
            result.extended.append(ExtendedSequence(plan.sequence_id, len(table), new, copies))
        table += new

    # --- until there is no room -----------------------------------------------

    def _resume_and_open(self, update: Update, result: UpdateResult) -> None:
        spare, is_full = update.num_spare_blocks, False
        for sequence_id in update.resumes:
            if any(one.sequence_id == sequence_id for one in result.resumed):
                continue
            reason = self._refuses_to_resume(sequence_id)
            if not reason:
                group = self._group(self.sequences[sequence_id])
                is_full = is_full or not self._fits(self._resume, group, spare, result)
                reason = "OUT_OF_BLOCKS" if is_full else ""
            if reason:
                result.refused.append(_refusal(sequence_id, reason))
        for _, numbered in groupby(
            enumerate(update.opens), key=lambda pair: pair[1].group_id or pair[0]
        ):
            plans = [plan for _, plan in numbered]
            sizes = [self._blocks.num_for(len(plan.token_ids)) for plan in plans]
            reason = "PROMPT_EXCEEDS_POOL"
            if is_full or max(sizes) <= self.num_blocks:
                is_full = is_full or not self._fits(self._open, plans, spare, result)
                reason = "OUT_OF_BLOCKS" if is_full else ""
            if reason:
                result.refused.extend(_refusal(plan.sequence_id, reason) for plan in plans)

    def _refuses_to_resume(self, sequence_id: str) -> str:
        entry = self.sequences.get(sequence_id)
        if entry is None:
            return "SEQUENCE_NOT_FOUND"
        if not entry.is_suspended:
            return "SEQUENCE_NOT_SUSPENDED"
        if num_blocks_of(self._blocks, self._group(entry)) > self.num_blocks:
            return "PROMPT_EXCEEDS_POOL"
        return ""

    def _fits(
        self,
        change: Callable[[list[T], int, UpdateResult], None],
        what: list[T],
        num_spare: int,
        result: UpdateResult,
    ) -> bool:
        """Make a change that needs room. If only pins are in the way, they give way."""
        while True:
            try:
                change(what, num_spare, result)
            except NoRoom:
                if not self.pins or any(not one.is_suspended for one in self.sequences.values()):
                    return False
                pin_id = next(iter(self.pins))
                del self.pins[pin_id]
                self._blocks.release(self._pinned.pop(pin_id))
            else:
                return True

    def _resume(self, group: list[FakeSequence], num_spare: int, result: UpdateResult) -> None:
        result.resumed.extend(resume_group(self._blocks, group, num_spare, self._completed))

    def _open(self, plans: list[OpenPlan], num_spare: int, result: UpdateResult) -> None:
        ids = [plan.sequence_id for plan in plans]
        if len(set(ids)) != len(ids) or not self.sequences.keys().isdisjoint(ids):
            raise ContractBroken(f"opened twice: {ids}")
        hits = [self._blocks.find(plan.namespace, plan.token_ids[:-1]) for plan in plans]
        sizes = [self._blocks.num_for(len(plan.token_ids)) for plan in plans]
        self._blocks.check_room(sum(sizes) - sum(map(len, hits)), hits, num_spare)
        for found in hits:
            self._blocks.hold(found)
        for plan, found, size in zip(plans, hits, sizes, strict=True):
            table = found + [self._blocks.take() for _ in range(size - len(found))]
            tokens, num_cached = list(plan.token_ids), len(found) * self.block_size
            self.sequences[plan.sequence_id] = FakeSequence(
                plan.sequence_id,
                tokens,
                plan.namespace,
                plan.group_id,
                table,
                len(tokens),
                num_cached,
            )
            result.opened.append(OpenedSequence(plan.sequence_id, list(table), num_cached))

    # --- parts ----------------------------------------------------------------

    def _resident(self, sequence_id: str) -> FakeSequence:
        entry = self.sequences.get(sequence_id)
        if entry is None or entry.is_suspended:
            raise _Refused("SEQUENCE_SUSPENDED" if entry else "SEQUENCE_NOT_FOUND")
        return entry

    def _group(self, entry: FakeSequence) -> list[FakeSequence]:
        """All of its group that are suspended, or resident, as it is."""
        same = (entry.group_id, entry.is_suspended)
        others = self.sequences.values() if entry.group_id else [entry]
        return [other for other in others if (other.group_id, other.is_suspended) == same]

    def _give_host_back(self, entry: FakeSequence) -> None:
        self._host_free.extend(entry.host_ids)
        entry.host_ids = []

    def _advance_pins(self) -> None:
        """Hold what there is of pinned prefixes by now."""
        for pin_id, plan in self.pins.items():
            held = self._pinned[pin_id]
            new = self._blocks.find(plan.namespace, plan.token_ids)[len(held) :]
            self._blocks.hold(new)
            held += new


def _each(
    entries: Sequence[T], change: Callable[[T, UpdateResult], None], result: UpdateResult
) -> None:
    for entry in entries:
        sequence_id = str(getattr(entry, "sequence_id", entry))
        try:
            change(entry, result)
        except _Refused as refused:
            result.refused.append(_refusal(sequence_id, str(refused)))
        except NoRoom:
            result.refused.append(_refusal(sequence_id, "OUT_OF_BLOCKS"))


def _refusal(sequence_id: str, reason: str) -> Refusal:
    return Refusal(sequence_id, reason, f"the fake kvstore says {reason}")
