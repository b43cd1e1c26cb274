"""Every invariant of the page manager, checked from scratch and reported in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.block_pool import BlockPool
from kvstore.frame_records import NO_PARENT
from kvstore.frames import Region
from kvstore.prefix_tree import Node
from kvstore.sequences import Sequence
from kvstore.state import PoolState
from kvstore.types import Finding, Namespace

_MOST_NAMED = 10  # blocks of one kind of finding that are named one by one


def findings(state: PoolState) -> list[Finding]:
    """What is wrong; nothing, if all is well."""
    found = []
    for kind, check in _CHECKS.items():
        try:
            found += [Finding(kind, text) for text in check(state)]
        except (LookupError, AttributeError, ValueError) as error:
            # What a check follows is itself what may be broken.
            found.append(Finding(kind, f"cannot be checked: {error!r}"))
    return found


def _references(state: PoolState) -> Iterator[str]:
    """Reference counts against everything that refers to a block."""
    frames = state.blocks.frames
    expected = np.zeros(frames.records.num_frames, np.int64)
    for one in state.sequences.values():
        for part in (one.block_ids, one.sources, one.host_ids):
            np.add.at(expected, np.array(part, np.int32), 1)
    for pin in state.pins.all():
        np.add.at(expected, np.array(pin.block_ids, np.int32), 1)
    np.add.at(expected, np.array(state.blocks.host.arriving(), np.int32), 1)
    for block in np.flatnonzero(frames.ref_counts != expected)[:_MOST_NAMED].tolist():
        counted, known = frames.ref_counts[block], expected[block]
        yield f"block {block} has {counted} references, {known} are known"


def _free_lists(state: PoolState) -> Iterator[str]:
    frames = state.blocks.frames
    for name, region in (("page pool", frames.device), ("host pool", frames.host)):
        yield from _free_list(state.blocks, name, region)


def _free_list(blocks: BlockPool, name: str, region: Region) -> Iterator[str]:
    frames = blocks.frames
    part = slice(region.first, region.first + region.num_blocks)
    is_held = frames.ref_counts[part] > 0
    findable = frames.findable[part]
    counted = (region.num_free, region.num_cached, region.num_held)
    num_held, num_cached = int(is_held.sum()), int((findable & ~is_held).sum())
    found = (region.num_blocks - num_held - num_cached, num_cached, num_held)
    if counted != found:
        yield f"{name}: free, cached, held are counted {counted}, found {found}"
    free = np.sort(np.array(region.free_list(), np.int64)) - region.first
    if not np.array_equal(free, np.flatnonzero(~is_held & ~findable)):
        yield f"{name}: the free list has other blocks than those that are free"


def _tree(state: PoolState) -> Iterator[str]:
    blocks = state.blocks
    tree, frames = blocks.tree, blocks.frames
    nodes = list(tree.walk())
    in_tree = Counter(b for node in nodes for b in node.blocks)
    arriving = {b for node in nodes if node.is_arriving for b in node.blocks}
    findable = set(np.flatnonzero(frames.findable).tolist())
    if findable | arriving != set(in_tree) or findable & arriving or in_tree.total() > len(in_tree):
        yield "the tree reaches other blocks than the findable ones"
    for node in nodes:
        parent = node.parent
        if parent is None or parent.end != node.start:
            yield "a node names another parent than the one above it"
        if not (node.is_alive and node.blocks):
            yield "a node is dead"
            continue
        ids = np.array(node.blocks, np.int32)
        if len(np.unique(frames.ref_counts[ids] > 0)) > 1:
            yield "a node is held in part"
        if node.grower is not None and node.grower.node is not node:
            yield "a node may grow with a chain that does not end in it"
        if any(owner is not node for owner in tree.owners[ids]):
            yield "a block names another node than its own"
        is_host = {frames.is_host(b) for b in node.blocks}
        above = {frames.is_host(b) for b in parent.blocks} if parent is not None else set()
        if len(is_host) > 1 or (is_host == {False} and True in above):
            yield "a node of the page pool is not in it as a whole, or below the host pool's"
    for root in tree.roots():
        if not root.children or tree.namespace_of(root.number) != root.namespace:
            yield f"namespace {root.number} has no prefixes, or another number"


def _records(state: PoolState) -> Iterator[str]:
    """What the next process would read against what this one knows."""
    blocks = state.blocks
    records, findable = blocks.frames.records, blocks.frames.findable
    for node in blocks.tree.walk():
        if node.is_arriving or not (node.is_alive and node.parent is not None):
            continue
        ids = np.array(node.blocks, np.int32)
        above = node.parent.blocks
        if bytes(records.tokens[ids].tobytes()) != bytes(node.data):
            yield f"the records of block {node.blocks[0]} and on have other tokens"
        expected = [above[-1] if above else NO_PARENT, *node.blocks[:-1]]
        if records.parents[ids].tolist() != expected:
            yield f"the records of block {node.blocks[0]} and on have other parents"
        if (records.namespaces[ids] != blocks.tree.number_of(node)).any():
            yield f"the records of block {node.blocks[0]} and on have another namespace"
    followers = np.flatnonzero(findable & (records.parents != NO_PARENT))
    parents = records.parents[followers]
    stale = records.parent_generations[followers] != records.generations[parents]
    arriving = np.array(blocks.host.arriving(), np.int32)
    for block in followers[stale & ~np.isin(parents, arriving)][:_MOST_NAMED].tolist():
        yield f"block {block} follows one that was given to somebody else since"
    if (records.generations[blocks.frames.ref_counts > 0] < 1).any():
        yield "a held block never left the free list"


def _queues(state: PoolState) -> Iterator[str]:
    blocks = state.blocks
    unheld = [node for node in blocks.tree.walk() if node.blocks and not blocks.is_held(node)]
    queues = {id(p.queue): p.queue for p in blocks.tenants.partitions}
    queues[id(blocks.host.queue)] = blocks.host.queue
    for key, queue in queues.items():
        mine = {id(node) for node in unheld if id(blocks.queue_of(node)) == key}
        if {id(node) for node in queue.nodes()} != mine:
            yield "the nodes to evict are other ones than those without references"


def _tenants(state: PoolState) -> Iterator[str]:
    blocks = state.blocks
    num_blocks, frames = blocks.frames.num_blocks, blocks.frames
    owners: NDArray[np.object_] = np.full(num_blocks, None, object)
    for node in blocks.tree.walk():
        if node.blocks and not frames.is_host(node.blocks[0]):
            owners[np.array(node.blocks, np.int32)] = _namespace(node, blocks).tenant
    for one in state.sequences.values():
        mine = np.array(one.block_ids + one.sources, np.int32)
        owners[mine[mine < num_blocks]] = one.chain.namespace.tenant
    is_held = frames.ref_counts[:num_blocks] > 0
    held, cached = (
        Counter(owners[is_held]),
        Counter(owners[frames.findable[:num_blocks] & ~is_held]),
    )
    pinned = Counter(owners[blocks.pin_counts > 0])
    for tenant in blocks.tenants.all():
        counted = (tenant.num_held, tenant.num_cached, tenant.num_pinned)
        found = (held[tenant.name], cached[tenant.name], pinned[tenant.name])
        if counted != found:
            yield f"{tenant.name!r}: held, cached, pinned are counted {counted}, found {found}"
        quota = tenant.limits.quota
        if quota is not None and tenant.num_used > quota and not blocks.tenants.are_strained:
            yield f"{tenant.name!r} has {tenant.num_used} blocks, its quota is {quota}"
    for partition in blocks.tenants.partitions:
        members = [t for t in blocks.tenants.all() if t.partition is partition]
        sums = (sum(t.num_held for t in members), sum(t.num_cached for t in members))
        if (partition.num_held, partition.num_cached) != sums:
            yield f"a partition counts {partition.num_held, partition.num_cached}, not {sums}"
    promised = sum(max(p.num_held, p.floor) for p in blocks.tenants.partitions)
    if promised > num_blocks and not blocks.tenants.are_strained:
        yield f"floors and what is held add up to {promised} of {num_blocks} blocks"


def _namespace(node: Node, blocks: BlockPool) -> Namespace:
    return blocks.tree.namespace_of(blocks.tree.number_of(node))


def _sequences(state: PoolState) -> Iterator[str]:
    waste = sum(state.waste(one) for one in state.sequences.values())
    if waste != state.num_waste_slots:
        yield f"waste is {waste} slots, counted {state.num_waste_slots}"
    for one in state.sequences.values():
        for text in _suspended(one) if one.is_suspended else _resident(state, one):
            yield f"{one.sequence_id}: {text}"


def _suspended(one: Sequence) -> Iterator[str]:
    if one.block_ids:
        yield "it is suspended and has blocks of the page pool"


def _resident(state: PoolState, one: Sequence) -> Iterator[str]:
    blocks, size = state.blocks, state.block_size
    num_blocks = len(one.block_ids)
    if not 0 <= num_blocks * size - one.length < size:
        yield f"{num_blocks} blocks for {one.length} tokens"
    if len(set(one.block_ids)) != num_blocks:
        yield "its table lists a block twice"
    if one.num_computed > min(one.length, len(one.tokens)):
        yield "more tokens are computed than known or than have a slot"
    if one.host_ids:
        yield "it is not suspended and has blocks of the host pool"
    # Full blocks that are shared or findable must have been written first.
    num_full = one.num_computed // size
    num_known = len(one.tokens) // size
    data = one.tokens[: num_known * size].tobytes()
    found = blocks.tree.find(one.chain.namespace, data)
    ids = np.array(one.block_ids, np.int32)
    for position in np.flatnonzero(blocks.frames.findable[ids]).tolist():
        block_id = one.block_ids[position]
        if one.may_share_tail and position == num_blocks - 1:
            continue  # cut within a block that others may find; it is copied before a write
        if position >= num_full and position >= one.num_forked_blocks:
            yield f"block {block_id} is findable before it was computed"
        elif found[position : position + 1] != [block_id]:
            yield f"block {block_id} is findable under another prefix"


def _pins(state: PoolState) -> Iterator[str]:
    blocks = state.blocks
    counts = np.zeros(blocks.frames.num_blocks, np.int32)
    for pin in state.pins.all():
        np.add.at(counts, np.array(pin.block_ids, np.int32), 1)
        found = blocks.tree.find(pin.namespace, pin.tokens.tobytes())
        if found[: len(pin.block_ids)] != pin.block_ids.tolist():
            yield f"pin {pin.pin_id!r} holds other blocks than its prefix"
    if not np.array_equal(counts, blocks.pin_counts):
        yield "blocks count other pins than there are"


def _journal(state: PoolState) -> Iterator[str]:
    if not state.journal.is_whole:
        yield "there was no room for the journal: if the process is killed now, all is lost"


def _leases(state: PoolState) -> Iterator[str]:
    orphans = [
        one.sequence_id for one in state.sequences.values() if one.epoch not in (0, state.epoch)
    ]
    if orphans:
        yield f"sequences of a driver whose lease is over: {orphans[:_MOST_NAMED]}"
    pins = [pin.pin_id for pin in state.pins.all() if pin.epoch not in (0, state.epoch)]
    if pins:
        yield f"pins of a driver whose lease is over: {pins[:_MOST_NAMED]}"


_CHECKS: dict[str, Callable[[PoolState], Iterator[str]]] = {
    "references": _references,
    "free list": _free_lists,
    "tree": _tree,
    "records": _records,
    "eviction": _queues,
    "tenants": _tenants,
    "sequences": _sequences,
    "pins": _pins,
    "leases": _leases,
    "journal": _journal,
}
