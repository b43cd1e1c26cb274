"""One driver step's changes in one call, each entry on its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvstore import growth, pinning
from kvstore.errors import InvalidRequest, KvStoreError, OutOfBlocks, QuotaExceeded
from kvstore.host_cache import TransferSize
from kvstore.opening import open_sequences
from kvstore.state import PoolState
from kvstore.types import (
    BlockCopy,
    ExtendPlan,
    OpenedSequence,
    OpenPlan,
    Refusal,
    ResumedSequence,
    Update,
    UpdateResult,
)


def update(state: PoolState, changes: Update, epoch: int) -> UpdateResult:
    """See PageManager.update."""
    result = UpdateResult(extended=[], opened=[], refused=[])
    state.blocks.host.is_open = changes.runs_copies
    try:
        for commit in changes.commits:
            try:
                growth.commit_blocks(state, (commit,), epoch)
            except KvStoreError as error:
                result.refused.append(_refusal(commit.sequence_id, error))
        _close(state, changes.closes, epoch, result)
        _extend_each(state, changes.extends, epoch, result)
        _open_until_full(state, changes, epoch, result)
    finally:
        state.blocks.host.is_open = False
    copies, transfer = take_copies(state, result.opened)
    return UpdateResult(result.extended, result.opened, result.refused, copies, transfer)


def check_reports(changes: Update) -> None:
    """Raises InvalidRequest for measurements that cannot be."""
    for name, value in (
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
    num_swapped_out: int = 0,
) -> tuple[list[BlockCopy], int]:
    """Copies that must come first, and the transfer that those of `sequences` are in, too."""
    is_host = state.blocks.frames.is_host
    num_host = num_inside = num_swaps = 0
    for one in sequences:
        num_in = sum(is_host(copy.source) for copy in one.copies)
        num_host += num_in
        num_inside += len(one.copies) - num_in
        num_swaps += num_in if isinstance(one, ResumedSequence) else 0
    size = TransferSize(num_host, num_inside, num_swaps + num_swapped_out)
    return state.blocks.host.take_copies(size)


def open_or_yield(
    state: PoolState, plans: Sequence[OpenPlan], epoch: int, *, copies: bool
) -> list[OpenedSequence]:
    """Open; if only pins are in the way, the weakest of them give way."""
    while True:
        try:
            return open_sequences(state, plans, epoch, copies=copies)
        except OutOfBlocks:
            if not (_only_pins_are_in_the_way(state, plans) and pinning.yield_one(state)):
                raise


def _only_pins_are_in_the_way(state: PoolState, plans: Sequence[OpenPlan]) -> bool:
    """While sequences run, their blocks will come free. Pins alone would stay."""
    if any(not one.is_suspended for one in state.sequences.values()):
        return False
    tenants = {state.blocks.tenants.get(plan.namespace.tenant) for plan in plans}
    needed = sum(state.num_blocks(len(plan.token_ids)) for plan in plans)
    return len(tenants) == 1 and needed <= state.blocks.tenants.most_blocks(tenants.pop())


def _close(state: PoolState, ids: Iterable[str], epoch: int, result: UpdateResult) -> None:
    closing = {}
    for sequence_id in ids:
        sequence = state.sequences.get(sequence_id)
        if sequence is not None:
            try:
                closing[sequence_id] = state.find(sequence_id, epoch)
            except KvStoreError as error:
                result.refused.append(_refusal(sequence_id, error))
    state.close(closing.values())


def _extend_each(
    state: PoolState, plans: Sequence[ExtendPlan], epoch: int, result: UpdateResult
) -> None:
    try:  # nearly always there is room for all of them
        result.extended.extend(growth.extend_sequences(state, plans, epoch))
    except KvStoreError:
        for plan in plans:
            try:
                result.extended.extend(growth.extend_sequences(state, (plan,), epoch))
            except KvStoreError as error:
                result.refused.append(_refusal(plan.sequence_id, error))


def _open_until_full(state: PoolState, changes: Update, epoch: int, result: UpdateResult) -> None:
    full: OutOfBlocks | None = None
    over_quota: dict[str, QuotaExceeded] = {}
    for plan in changes.opens:
        # None overtakes another that waits for the same: the pool's room, or its tenant's.
        obstacle = full or over_quota.get(plan.namespace.tenant)
        if obstacle is not None:
            result.refused.append(_refusal(plan.sequence_id, obstacle))
            continue
        try:
            result.opened.extend(open_or_yield(state, (plan,), epoch, copies=changes.runs_copies))
        except KvStoreError as error:
            if isinstance(error, OutOfBlocks):
                full = error
            if isinstance(error, QuotaExceeded):
                over_quota[plan.namespace.tenant] = error
            result.refused.append(_refusal(plan.sequence_id, error))


def _refusal(sequence_id: str, error: KvStoreError) -> Refusal:
    return Refusal(sequence_id, error.reason, str(error))
