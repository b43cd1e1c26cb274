"""One driver step's changes in one call, each entry on its own.

The driver runs the copies of an answer in this order: those between the pools (`copies`),
then those of extensions, of resumptions, of openings. The order of changes makes that safe:

- What leaves the page pool, by suspension or eviction, is read by the first copies of all.
  So its blocks can be given out again by the same update.
- A block that an extension replaces may be evicted and given out again, too, but only to
  entries behind that extension, whose copies come behind its own.
- What resumptions and openings read is held until their sequences' next commits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Protocol, TypeVar

from kvstore import growth, pinning, sharing
from kvstore.errors import InvalidRequest, KvStoreError, OutOfBlocks, QuotaExceeded
from kvstore.host_cache import TransferSize
from kvstore.opening import open_sequences
from kvstore.returning import resume_sequences
from kvstore.state import PoolState
from kvstore.swapping import suspend_sequences
from kvstore.types import (
    BlockCopy,
    CommitPlan,
    OpenedSequence,
    OpenPlan,
    Refusal,
    ResumedSequence,
    SuspendPlan,
    TruncatePlan,
    Update,
    UpdateResult,
)


class _Plan(Protocol):
    @property
    def sequence_id(self) -> str: ...


P = TypeVar("P", bound=_Plan)
A = TypeVar("A")

LISTS = ("commits", "forks", "closes", "truncates", "suspends", "extends", "resumes", "opens")


def update(state: PoolState, changes: Update, epoch: int) -> UpdateResult:
    """See PageManager.update."""
    result = UpdateResult(extended=[], opened=[], refused=[])
    state.blocks.host.is_open = changes.runs_copies
    try:
        _apply(state, changes, epoch, result)
    finally:
        state.blocks.host.is_open = False
    copies, transfer = take_copies(
        state,
        [*result.resumed, *result.opened],
        num_swapped_out=sum(one.num_copied_blocks for one in result.suspended),
        num_replaced=sum(one.copied_from is not None for one in result.extended),
    )
    frames = state.blocks.frames
    return UpdateResult(
        result.extended,
        result.opened,
        result.refused,
        copies,
        transfer,
        result.forked,
        result.suspended,
        result.resumed,
        frames.num_free + frames.num_cached,
    )


def _apply(state: PoolState, changes: Update, epoch: int, result: UpdateResult) -> None:
    refused, copies = result.refused, changes.runs_copies

    def commit(plans: Sequence[CommitPlan]) -> list[None]:
        growth.commit_blocks(state, plans, epoch)
        return []

    def truncate(plans: Sequence[TruncatePlan]) -> list[None]:
        sharing.truncate_sequences(state, plans, epoch)
        return []

    _each(changes.commits, commit, [], refused)
    _each(
        changes.forks, lambda its: sharing.fork_sequences(state, its, epoch), result.forked, refused
    )
    _close(state, changes.closes, epoch, result)
    _each(changes.truncates, truncate, [], refused)
    _suspend(state, changes.suspends, epoch, result, copies=copies)
    _each(
        changes.extends,
        lambda its: growth.extend_sequences(state, its, epoch),
        result.extended,
        refused,
    )
    if changes.resumes or changes.opens:
        _Admission(state, changes, epoch, result).run()


def check_reports(changes: Update) -> None:
    """Raises InvalidRequest for measurements that cannot be."""
    for name, value in (
        ("spare_block_count", changes.num_spare_blocks),
        ("completed_transfer", changes.completed_transfer),
        ("transfer_duration", changes.transfer_seconds),
        ("prefill_token_count", changes.num_prefill_tokens),
        ("prefill_duration", changes.prefill_seconds),
    ):
        if not 0 <= value < math.inf:
            raise InvalidRequest(name, f"{value} is below 0, or no number")


def take_copies(
    state: PoolState,
    sequences: Iterable[OpenedSequence | ResumedSequence],
    *,
    num_swapped_out: int = 0,
    num_replaced: int = 0,
) -> tuple[list[BlockCopy], int]:
    """Copies that must come first, and the transfer that those of `sequences` are in, too.

    Copies of replaced blocks are no reason for a transfer, and take a part of its time.
    """
    is_host = state.blocks.frames.is_host
    num_host = num_inside = num_swaps = 0
    for one in sequences:
        num_in = sum(is_host(copy.source) for copy in one.copies)
        num_host += num_in
        num_inside += len(one.copies) - num_in
        num_swaps += num_in if isinstance(one, ResumedSequence) else 0
    size = TransferSize(num_host, num_inside, num_swaps + num_swapped_out)
    return state.blocks.host.take_copies(size, num_replaced)


# --- each on its own --------------------------------------------------------


def _each(
    plans: Sequence[P],
    change: Callable[[Sequence[P]], Iterable[A]],
    answers: list[A],
    refused: list[Refusal],
) -> None:
    """All at once, if there is nothing to refuse, as nearly always; else one by one."""
    if not plans:
        return
    try:
        answers.extend(change(plans))
    except KvStoreError:
        for plan in plans:
            try:
                answers.extend(change((plan,)))
            except KvStoreError as error:
                refused.append(_refusal(plan.sequence_id, error))


def _close(state: PoolState, ids: Iterable[str], epoch: int, result: UpdateResult) -> None:
    closing = {}
    for sequence_id in ids:
        sequence = state.sequences.get(sequence_id)
        if sequence is not None:
            try:
                closing[sequence_id] = state.find(sequence_id, epoch)
            except KvStoreError as error:
                result.refused.append(_refusal(sequence_id, error))
    if closing:
        state.close(closing.values())


def _suspend(
    state: PoolState,
    plans: Iterable[SuspendPlan],
    epoch: int,
    result: UpdateResult,
    *,
    copies: bool,
) -> None:
    gone: set[str] = set()  # with others of their groups
    for plan in plans:
        if plan.sequence_id in gone:
            continue
        try:
            suspended = suspend_sequences(state, (plan,), epoch, copies=copies)
        except KvStoreError as error:
            result.refused.append(_refusal(plan.sequence_id, error))
        else:
            result.suspended.extend(suspended)
            gone.update(one.sequence_id for one in suspended)


# --- until there is no room -------------------------------------------------


@dataclass(slots=True)
class _Admission:
    """Resumptions, then openings, until one finds no room.

    None overtakes another that waits for the same: the pool's room, or its tenant's.
    """

    state: PoolState
    changes: Update
    epoch: int
    result: UpdateResult
    full: OutOfBlocks | None = None
    over_quota: dict[str, QuotaExceeded] = field(default_factory=dict)

    def run(self) -> None:
        back: set[str] = set()  # with others of their groups
        for sequence_id in self.changes.resumes:
            if sequence_id not in back:
                sequence = self.state.sequences.get(sequence_id)
                tenant = sequence.chain.namespace.tenant if sequence is not None else ""
                resumed = self._try([sequence_id], {tenant}, partial(self._resume, sequence_id))
                self.result.resumed.extend(resumed)
                back.update(one.sequence_id for one in resumed)
        for plans in _neighbours(self.changes.opens):
            tenants = {plan.namespace.tenant for plan in plans}
            opened = self._try([p.sequence_id for p in plans], tenants, partial(self._open, plans))
            self.result.opened.extend(opened)

    def _resume(self, sequence_id: str) -> list[ResumedSequence]:
        copies, num_spare = self.changes.runs_copies, self.changes.num_spare_blocks
        return resume_or_yield(
            self.state, [sequence_id], self.epoch, copies=copies, num_spare=num_spare
        )

    def _open(self, plans: Sequence[OpenPlan]) -> list[OpenedSequence]:
        copies, num_spare = self.changes.runs_copies, self.changes.num_spare_blocks
        return open_or_yield(self.state, plans, self.epoch, copies=copies, num_spare=num_spare)

    def _try(
        self, sequence_ids: Iterable[str], tenants: Iterable[str], change: Callable[[], list[A]]
    ) -> list[A]:
        """Make a change, or refuse all of these sequences."""
        error: KvStoreError | None = self.full
        for tenant in tenants:
            error = error or self.over_quota.get(tenant)
        if error is None:
            try:
                return change()
            except KvStoreError as raised:
                error = raised
        if isinstance(error, OutOfBlocks):
            self.full = error
        if isinstance(error, QuotaExceeded):
            self.over_quota[error.tenant] = error
        self.result.refused.extend(_refusal(sequence_id, error) for sequence_id in sequence_ids)
        return []


def _neighbours(plans: Sequence[OpenPlan]) -> list[list[OpenPlan]]:
    """Plans that are opened together: one after the other, of the same group."""
    numbered = groupby(enumerate(plans), key=lambda pair: pair[1].group or pair[0])
    return [[plan for _, plan in pairs] for _, pairs in numbered]


def open_or_yield(
    state: PoolState, plans: Sequence[OpenPlan], epoch: int, *, copies: bool, num_spare: int = 0
) -> list[OpenedSequence]:
    """Open; if only pins are in the way, the weakest of them give way."""
    while True:
        try:
            return open_sequences(state, plans, epoch, copies=copies, num_spare=num_spare)
        except OutOfBlocks:
            if not (_can_fit(state, plans) and _a_pin_yields(state)):
                raise


def resume_or_yield(
    state: PoolState, ids: Sequence[str], epoch: int, *, copies: bool, num_spare: int = 0
) -> list[ResumedSequence]:
    """Resume; if only pins are in the way, the weakest of them give way."""
    while True:
        try:
            return resume_sequences(state, ids, epoch, copies=copies, num_spare=num_spare)
        except OutOfBlocks:
            # What could never fit is another error, unless it was asked for together.
            if not (len(ids) == 1 and _a_pin_yields(state)):
                raise


def _can_fit(state: PoolState, plans: Sequence[OpenPlan]) -> bool:
    tenants = {state.blocks.tenants.get(plan.namespace.tenant) for plan in plans}
    needed = sum(state.num_blocks(len(plan.token_ids)) for plan in plans)
    return len(tenants) == 1 and needed <= state.blocks.tenants.most_blocks(tenants.pop())


def _a_pin_yields(state: PoolState) -> bool:
    """While sequences run, their blocks will come free. Pins alone would stay."""
    if any(not one.is_suspended for one in state.sequences.values()):
        return False
    return pinning.yield_one(state)


def _refusal(sequence_id: str, error: KvStoreError) -> Refusal:
    return Refusal(sequence_id, error.reason, str(error))
