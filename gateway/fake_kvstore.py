"""A page manager for tests: it allocates real blocks and refuses what the contract refuses."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from gateway.errors import WorkerUnavailable
from gateway.ports import (
    CommitPlan,
    ExtendedSequence,
    ExtendPlan,
    Namespace,
    OpenedSequence,
    OpenPlan,
    Refusal,
    Update,
    UpdateResult,
)

_Key = tuple[Namespace, tuple[int, ...]]


class ContractBroken(Exception):
    """The driver did what the contracts forbid."""


@dataclass(slots=True)
class _Open:
    token_ids: list[int]
    namespace: Namespace
    block_ids: list[int]
    length: int
    num_computed: int


class FakeKvStore:
    """The page manager's contract over a list of free blocks and a dict of prefixes.

    Set `is_down` to make it unreachable.
    """

    def __init__(self, num_blocks: int = 64, block_size: int = 4) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.is_down = False
        self.updates: list[Update] = []
        self.sequences: dict[str, _Open] = {}
        self._ref_counts = [0] * num_blocks
        self._free = deque(range(num_blocks))
        self._cached: dict[_Key, int] = {}
        self._key_of: dict[int, _Key] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    async def become_driver(self, driver_id: str) -> None:  # noqa: ARG002 - for a log
        await asyncio.sleep(0)
        if self.is_down:
            raise WorkerUnavailable("the fake kvstore is down")
        self._close_all()

    async def resign(self) -> None:
        await asyncio.sleep(0)
        if self.is_down:
            raise WorkerUnavailable("the fake kvstore is down")
        self._close_all()

    def _close_all(self) -> None:
        for sequence_id in list(self.sequences):
            self._close(sequence_id)

    async def update_sequences(self, update: Update) -> UpdateResult:
        await asyncio.sleep(0)
        if self.is_down:
            raise WorkerUnavailable("the fake kvstore is down")
        return self.apply(update)

    async def close(self) -> None:
        await asyncio.sleep(0)

    def restart(self) -> None:
        """Lose everything, as a new process would."""
        self.__init__(self.num_blocks, self.block_size)  # type: ignore[misc]

    def apply(self, update: Update) -> UpdateResult:
        if not update:
            raise ContractBroken("an empty update")
        self.updates.append(update)
        result = UpdateResult([], [], [])
        for commit in update.commits:
            self._commit(commit, result)
        for sequence_id in update.closes:
            self._close(sequence_id)
        for extend in update.extends:
            self._extend(extend, result)
        has_room = True
        for plan in update.opens:
            has_room = has_room and self._open(plan, result)
            if not has_room:
                result.refused.append(Refusal(plan.sequence_id, "OUT_OF_BLOCKS", "no room"))
        return result

    def _commit(self, plan: CommitPlan, result: UpdateResult) -> None:
        entry = self.sequences.get(plan.sequence_id)
        if entry is None:
            result.refused.append(Refusal(plan.sequence_id, "SEQUENCE_NOT_FOUND", "unknown"))
            return
        known = entry.token_ids
        overlap = known[plan.token_start : plan.token_start + len(plan.token_ids)]
        if plan.token_start > len(known) or list(plan.token_ids[: len(overlap)]) != overlap:
            raise ContractBroken(f"commit of other tokens: {plan}")
        known += plan.token_ids[len(overlap) :]
        if plan.num_computed_tokens > min(entry.length, len(known)):
            raise ContractBroken(f"commit beyond the sequence: {plan}")
        entry.num_computed = max(entry.num_computed, plan.num_computed_tokens)
        for index in range(entry.num_computed // self.block_size):
            key = entry.namespace, tuple(known[: (index + 1) * self.block_size])
            block_id = entry.block_ids[index]
            if key not in self._cached and block_id not in self._key_of:
                self._cached[key] = block_id
                self._key_of[block_id] = key

    def _close(self, sequence_id: str) -> None:
        entry = self.sequences.pop(sequence_id, None)
        for block_id in reversed(entry.block_ids if entry else []):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free.append(block_id)

    def _extend(self, plan: ExtendPlan, result: UpdateResult) -> None:
        entry = self.sequences.get(plan.sequence_id)
        if entry is None:
            result.refused.append(Refusal(plan.sequence_id, "SEQUENCE_NOT_FOUND", "unknown"))
            return
        first = len(entry.block_ids)
        num_new = -(-plan.length // self.block_size) - first
        if num_new > len(self._free):
            result.refused.append(Refusal(plan.sequence_id, "OUT_OF_BLOCKS", "no room"))
            return
        entry.length = max(entry.length, plan.length)
        if num_new > 0:
            entry.block_ids += [self._take() for _ in range(num_new)]
            result.extended.append(
                ExtendedSequence(plan.sequence_id, first, entry.block_ids[first:])
            )

    def _open(self, plan: OpenPlan, result: UpdateResult) -> bool:
        tokens = list(plan.token_ids)
        num_needed = -(-len(tokens) // self.block_size)
        if num_needed > self.num_blocks:
            result.refused.append(Refusal(plan.sequence_id, "PROMPT_EXCEEDS_POOL", "never fits"))
            return True
        if plan.sequence_id in self.sequences:
            raise ContractBroken(f"opened twice: {plan.sequence_id}")
        hits = []
        for end in range(self.block_size, len(tokens), self.block_size):
            block_id = self._cached.get((plan.namespace, tuple(tokens[:end])))
            if block_id is None:
                break
            hits.append(block_id)
        num_idle_hits = sum(self._ref_counts[block_id] == 0 for block_id in hits)
        if num_needed - len(hits) > len(self._free) - num_idle_hits:
            return False
        for block_id in hits:
            if self._ref_counts[block_id] == 0:
                self._free.remove(block_id)
            self._ref_counts[block_id] += 1
        block_ids = hits + [self._take() for _ in range(num_needed - len(hits))]
        num_cached = len(hits) * self.block_size
        self.sequences[plan.sequence_id] = _Open(
            tokens, plan.namespace, block_ids, len(tokens), num_cached
        )
        result.opened.append(OpenedSequence(plan.sequence_id, list(block_ids), num_cached))
        return True

    def _take(self) -> int:
        block_id = self._free.popleft()
        self._ref_counts[block_id] = 1
        key = self._key_of.pop(block_id, None)
        if key is not None:
            del self._cached[key]
        return block_id
