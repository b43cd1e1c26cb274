"""Sequences that grow: slots for more tokens, and the news that their KV is there."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator

from kvstore import pinning
from kvstore.errors import InvalidCommit
from kvstore.sequences import Sequence, check_commit
from kvstore.state import PoolState
from kvstore.tenants import Tenant
from kvstore.types import BlockId, CommitPlan, ExtendedSequence, ExtendPlan


def extend_sequences(
    state: PoolState, plans: Iterable[ExtendPlan], epoch: int
) -> list[ExtendedSequence]:
    """See PageManager.extend_sequences."""
    size, sequences = state.block_size, state.sequences
    lengths: dict[Sequence, int] = {}
    growths: list[tuple[Sequence, int, bool]] = []  # blocks to add, one of them a copy
    copied: Counter[BlockId] = Counter()
    num_needed = num_tokens = 0
    for plan in plans:
        length = plan.length
        sequence = sequences.get(plan.sequence_id)
        if sequence is None or sequence.epoch != epoch or sequence.is_suspended:
            sequence = state.find_resident(plan.sequence_id, epoch)  # raises
        before = lengths.get(sequence, sequence.length)
        if length <= before:
            continue
        lengths[sequence] = length
        num_tokens += length - before
        count = (length - 1) // size - (before - 1) // size
        copies = False
        if sequence.may_share_tail and before == sequence.length:
            copies = _copies_tail(state, sequence, copied)
        if count or copies:
            num_needed += count + copies
            growths.append((sequence, count + copies, copies))
    if not lengths:
        return []
    answers = [
        _grow(state, sequence, copies, new)
        for (sequence, _, copies), new in zip(growths, _allocate(state, growths), strict=True)
    ]
    ends: list[int] = []
    for sequence, length in lengths.items():
        sequence.length = length
        sequence.may_share_tail = False
        ends += (sequence.serial, length)
    state.num_waste_slots += (num_needed - copied.total()) * size - num_tokens
    state.journal.extend(ends, [sequence.serial for sequence, _, _ in growths], answers)
    return answers


def commit_blocks(state: PoolState, plans: Iterable[CommitPlan], epoch: int) -> None:
    """See PageManager.commit_blocks."""
    checked: dict[str, tuple[Sequence, CommitPlan, array[int]]] = {}
    for plan in plans:
        if plan.sequence_id in checked:
            raise InvalidCommit("sequence_id", f"{plan.sequence_id!r} is listed twice")
        sequence = state.find_resident(plan.sequence_id, epoch)
        checked[plan.sequence_id] = (sequence, plan, check_commit(sequence, plan))
    # First on paper: what is findable must have been computed, whenever we are killed.
    state.journal.commit(
        [
            (sequence.serial, plan.num_computed_tokens, new, plan.driver_state)
            for sequence, plan, new in checked.values()
        ]
    )
    for sequence, plan, new in checked.values():
        apply_commit(sequence, plan.num_computed_tokens, new, plan.driver_state)
        state.release_sources(sequence)
        if state.publish(sequence):
            pinning.advance(state, sequence.chain.namespace)


def apply_commit(
    sequence: Sequence, num_computed: int, new: array[int], driver_state: bytes | None
) -> None:
    """What a commit does to the sequence itself."""
    sequence.tokens.extend(new)
    sequence.num_computed = max(sequence.num_computed, num_computed)
    if driver_state is not None:
        sequence.driver_state = driver_state


def apply_copy(sequence: Sequence, index: int, block_size: int) -> None:
    """A block of the table is yet to be copied: what it holds counts when it is committed.

    The answer that says so may be lost, and the copy with it.
    """
    sequence.num_computed = min(sequence.num_computed, index * block_size)


def _copies_tail(state: PoolState, sequence: Sequence, copied: Counter[BlockId]) -> bool:
    """Whether the next slot is in a block that others read; counts it then.

    The last of those who share a block writes to it: by then it is the sole owner,
    unless the block can be found by its prefix.
    """
    if sequence.length % state.block_size == 0:
        return False
    tail = sequence.block_ids[-1]
    frames = state.blocks.frames
    if not frames.findable[tail] and frames.ref_counts[tail] - copied[tail] <= 1:
        return False
    copied[tail] += 1
    return True


def _allocate(state: PoolState, growths: list[tuple[Sequence, int, bool]]) -> Iterator[array[int]]:
    """The new blocks of each growth, all of them or none."""
    blocks = state.blocks
    tenants = [blocks.tenant(sequence.chain) for sequence, _, _ in growths]
    needs: Counter[Tenant] = Counter()
    for tenant, (_, count, _) in zip(tenants, growths, strict=True):
        needs[tenant] += count
    if len(needs) > 1:
        blocks.tenants.check_room(needs)
    new = {tenant: blocks.allocate(count, tenant) for tenant, count in needs.items()}
    ends: Counter[Tenant] = Counter()
    parts = []
    for tenant, (_, count, _) in zip(tenants, growths, strict=True):
        ends[tenant] += count
        parts.append(new[tenant][ends[tenant] - count : ends[tenant]])
    return iter(parts)


def _grow(state: PoolState, sequence: Sequence, copies: bool, new: array[int]) -> ExtendedSequence:
    first_index = len(sequence.block_ids)
    if not copies:
        sequence.block_ids.extend(new)
        return ExtendedSequence(sequence.sequence_id, first_index, new.tolist())
    old = sequence.block_ids.pop()
    sequence.block_ids.extend(new)
    apply_copy(sequence, first_index - 1, state.block_size)
    state.blocks.cut(sequence.chain, first_index - 1, array("i", [old]), first_index - 1)
    return ExtendedSequence(sequence.sequence_id, first_index - 1, new.tolist(), old)
