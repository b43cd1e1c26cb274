"""Sequences that share blocks: forks, and cuts within what is shared."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.errors import InvalidRequest, SequenceExists, SequenceNotFound, SequenceSuspended
from kvstore.sequences import Sequence, check_id
from kvstore.state import PoolState
from kvstore.types import ForkedSequence, ForkPlan, TruncatePlan


def fork_sequences(state: PoolState, plans: Iterable[ForkPlan], epoch: int) -> list[ForkedSequence]:
    """See PageManager.fork_sequences."""
    plans = list(plans)
    made: dict[str, int] = {}  # how many tokens each of them gets
    for plan in plans:
        check_id(plan.sequence_id)
        num_known = made.get(plan.source_id)
        if num_known is None:
            num_known = _num_known(state, plan.source_id)
        if plan.sequence_id in made or plan.sequence_id in state.sequences:
            raise SequenceExists(plan.sequence_id)
        if not 0 <= plan.length <= num_known:
            raise InvalidRequest("length", f"{plan.length} is not from 1 to {num_known}, or 0")
        made[plan.sequence_id] = plan.length or num_known
    forks = []
    for plan in plans:
        source = state.sequences[plan.source_id]
        fork = _fork(state, source, plan.sequence_id, epoch, made[plan.sequence_id])
        forks.append((source, fork))
    state.journal.fork(forks)
    return [
        ForkedSequence(fork.sequence_id, fork.block_ids.tolist(), fork.length, fork.num_computed)
        for _, fork in forks
    ]


def truncate_sequences(state: PoolState, plans: Iterable[TruncatePlan], epoch: int) -> None:
    """See PageManager.truncate_sequences."""
    plans = list(plans)
    lengths: dict[str, int] = {}  # as they are after the plans before
    for plan in plans:
        sequence = state.find_resident(plan.sequence_id, epoch)
        limit = lengths.get(plan.sequence_id, sequence.length)
        if not 1 <= plan.length <= limit:
            raise InvalidRequest("length", f"{plan.length} is not from 1 to {limit}")
        lengths[plan.sequence_id] = plan.length
    # First on paper: a token that is cut must not come back with the blocks it was in.
    state.journal.truncate(
        [(state.sequences[plan.sequence_id].serial, plan.length) for plan in plans]
    )
    for plan in plans:
        sequence = state.sequences[plan.sequence_id]
        keep = state.num_blocks(plan.length)
        state.num_waste_slots -= state.waste(sequence)
        cut = sequence.block_ids[keep:]
        apply_truncate(sequence, plan.length, keep)
        # The chain may still cover a block that is cut within, until its copy replaces it. One
        # that is not in the tree is written again as it is: the chain leaves its prefix now.
        tail = sequence.block_ids[-1]
        is_rewritten = keep * state.block_size > plan.length and not state.blocks.is_findable(tail)
        state.blocks.cut(sequence.chain, keep - is_rewritten, cut, keep)
        state.num_waste_slots += state.waste(sequence)


def apply_truncate(sequence: Sequence, length: int, num_blocks: int) -> None:
    """What a truncation does to the sequence itself."""
    del sequence.block_ids[num_blocks:]
    del sequence.tokens[length:]
    sequence.num_forked_blocks = min(sequence.num_forked_blocks, num_blocks)
    sequence.length = length
    sequence.num_computed = min(sequence.num_computed, length)
    sequence.num_prompt_tokens = min(sequence.num_prompt_tokens, length)
    sequence.num_cached_tokens = min(sequence.num_cached_tokens, length)
    sequence.may_share_tail = True


def apply_fork(
    source: Sequence, sequence_id: str, serial: int, epoch: int, num_tokens: int, block_size: int
) -> Sequence:
    """The second sequence, without references of its own yet."""
    # Slots beyond its tokens are promised to the source alone.
    length = min(source.length, num_tokens)
    table = source.block_ids[: -(-length // block_size)]
    source.may_share_tail = True
    source.num_forked_blocks = max(source.num_forked_blocks, len(table))
    return Sequence(
        sequence_id=sequence_id,
        serial=serial,
        tokens=source.tokens[:num_tokens],
        num_prompt_tokens=min(source.num_prompt_tokens, num_tokens),
        num_cached_tokens=min(source.num_cached_tokens, num_tokens),
        block_ids=table,
        length=length,
        num_computed=min(source.num_computed, length),
        chain=source.chain,
        epoch=epoch,
        driver_state=source.driver_state,
        group=source.group,
        may_share_tail=True,
        num_forked_blocks=len(table),
    )


def _num_known(state: PoolState, source_id: str) -> int:
    source = state.sequences.get(source_id)
    if source is None:
        raise SequenceNotFound(source_id)
    if source.is_suspended:
        raise SequenceSuspended(source_id)
    return len(source.tokens)


def _fork(
    state: PoolState, source: Sequence, sequence_id: str, epoch: int, num_tokens: int
) -> Sequence:
    size = state.block_size
    fork = apply_fork(source, sequence_id, state.next_serial, epoch, num_tokens, size)
    num_shared = len(fork.block_ids)
    # A block that it has a part of is not in its prefix, though others may find it.
    fork.chain = state.blocks.share(
        source.chain, fork.block_ids, source.block_ids[num_shared:], fork.length // size
    )
    state.add(fork)
    return fork
