"""Taking sequences off the page pool."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvstore.prefix_tree import Chain, Node
from kvstore.sequences import Sequence
from kvstore.state import PoolState
from kvstore.types import (
    BlockId,
    SuspendedSequence,
    SuspendMode,
    SuspendPlan,
)


@dataclass(slots=True)
class _Leaving:
    """A sequence that is to go, and what nobody but its group has of it."""

    sequence: Sequence
    mode: SuspendMode
    nodes: list[Node] = field(default_factory=list)  # the last one first
    tail: BlockId | None = None  # the block that is not full
    num_blocks: int = 0
    num_tokens: int = 0
    num_freed: int = 0


def suspend_sequences(
    state: PoolState, plans: Iterable[SuspendPlan], epoch: int, *, copies: bool
) -> list[SuspendedSequence]:
    """See PageManager.suspend_sequences."""
    modes: dict[str, SuspendMode] = {}
    for plan in plans:
        for sequence in state.group(state.find_resident(plan.sequence_id, epoch)):
            modes.setdefault(sequence.sequence_id, plan.mode)
    leaving = [_Leaving(state.sequences[key], mode) for key, mode in modes.items()]
    for one in leaving:
        state.publish(one.sequence)
    _find_own(state, leaving)
    for one in leaving:
        num_held = state.blocks.frames.num_held
        _let_go(state, one.sequence)
        one.num_freed = num_held - state.blocks.frames.num_held
    answers = [_store(state, one, copies=copies) for one in leaving]
    state.journal.sequences([one.sequence for one in leaving])
    return answers


def _find_own(state: PoolState, leaving: list[_Leaving]) -> None:
    """What would be lost with these sequences: blocks that nobody else holds."""
    frames, size = state.blocks.frames, state.block_size
    own_counts = Counter(b for one in leaving for b in one.sequence.block_ids)
    seen: set[BlockId] = set()
    for one in leaving:
        sequence = one.sequence
        for node in state.blocks.tree.path(sequence.chain):
            first = node.blocks[0]
            if first not in seen and frames.ref_counts[first] == own_counts[first]:
                seen.add(first)
                one.nodes.append(node)
                one.num_blocks += len(node.blocks)
                one.num_tokens += len(node.blocks) * size
        in_tail = sequence.num_computed % size
        if in_tail:
            # Of a shared one each takes a copy: it would get its own with the next token.
            one.tail = sequence.block_ids[sequence.num_computed // size]
            one.num_blocks += 1
            one.num_tokens += in_tail


def _let_go(state: PoolState, sequence: Sequence) -> None:
    """Drop its references. What was computed in full stays where it is for now."""
    state.num_waste_slots -= state.waste(sequence)
    state.release(sequence)
    sequence.chain = Chain(sequence.chain.namespace)
    sequence.block_ids = array("i")
    sequence.host_ids = array("i")
    sequence.is_suspended = True
    sequence.has_host_tail = False


def _store(state: PoolState, one: _Leaving, *, copies: bool) -> SuspendedSequence:
    """Decide, and move the sequence's own blocks to the host pool if that is worth it."""
    costs, host = state.costs, state.blocks.host
    swap = costs.swap_seconds(one.num_blocks)
    recompute = costs.recompute_seconds(one.num_tokens)
    mode, reason = _decide(state, one, swap, recompute, copies=copies)
    num_copied = 0
    if mode is SuspendMode.SWAP:
        for node in one.nodes:
            num_copied += _keep(state, one.sequence, node)
        if one.tail is not None and host.make_room(1):
            num_copied += 1
            one.sequence.host_ids.append(host.store_tail(one.tail, one.sequence))
    costs.stats.decided(mode, swap if mode is SuspendMode.SWAP else recompute)
    return SuspendedSequence(
        sequence_id=one.sequence.sequence_id,
        mode=mode,
        reason=reason,
        swap_seconds=swap,
        recompute_seconds=recompute,
        num_copied_blocks=num_copied,
        num_freed_blocks=one.num_freed,
    )


def _decide(
    state: PoolState, one: _Leaving, swap: float, recompute: float, *, copies: bool
) -> tuple[SuspendMode, str]:
    host = state.blocks.host
    if one.mode is SuspendMode.RECOMPUTE:
        return one.mode, "asked for"
    if not copies:
        return SuspendMode.RECOMPUTE, "whoever asks runs no copies"
    if not host.num_blocks:
        return SuspendMode.RECOMPUTE, "there is no host pool"
    text = f"swap takes {swap * 1e3:.3g} ms, recomputing {recompute * 1e3:.3g} ms"
    if one.mode is SuspendMode.SWAP:
        text = "asked for"
    elif recompute <= swap:
        return SuspendMode.RECOMPUTE, text
    if host.make_room(one.num_blocks) < one.num_blocks:
        return SuspendMode.RECOMPUTE, f"the host pool has no room for {one.num_blocks} blocks"
    return SuspendMode.SWAP, text


def _keep(state: PoolState, sequence: Sequence, node: Node) -> int:
    """Move a node to the host pool and hold it there; how many blocks that was."""
    blocks = state.blocks
    if blocks.is_held(node) or blocks.frames.is_host(node.blocks[0]):
        return 0
    tenant = blocks.tenant_of(node)
    moved = blocks.host.demote(node, len(node.blocks))
    if not moved:
        return 0  # something else is below it in the page pool: it stays there as well
    tenant.partition.queue.forget(node)
    tenant.count(cached=-moved)
    blocks.frames.hold(np.array(node.blocks, np.int32))
    sequence.host_ids.extend(node.blocks)
    return moved
