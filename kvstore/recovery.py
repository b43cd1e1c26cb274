"""Finding again what a page manager before us has left: from its journal and frame records.

The journal says which sequences and pins there are, the frame records which blocks are
findable. Reference counts, free lists, the tree and all counters follow from those.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import journal, pinning
from kvstore.block_pool import BlockPool
from kvstore.errors import KvStoreError
from kvstore.frame_records import NO_PARENT, FrameRecords
from kvstore.growth import apply_commit, apply_copy
from kvstore.pin_book import Pin
from kvstore.prefix_tree import Chain, Node, Root
from kvstore.sequences import Sequence
from kvstore.sharing import apply_fork, apply_truncate
from kvstore.state import PoolState
from kvstore.tenants import Tenant
from kvstore.types import KvShape, Namespace, PoolLayout


@dataclass(slots=True)
class Recovered:
    """What a journal says. `layout` is None if it does not say for which pool it is."""

    layout: PoolLayout | None = None
    num_host_blocks: int = 0
    generation: int = 0
    epoch: int = 0
    next_serial: int = 0
    sequences: dict[int, Sequence] = field(default_factory=dict)  # by serial
    pins: dict[str, Pin] = field(default_factory=dict)
    namespaces: dict[int, Namespace] = field(default_factory=dict)


def replay(records: Iterable[bytes]) -> Recovered:
    """Read a journal. Raises ValueError if a record makes no sense."""
    found = Recovered()
    for record in records:
        try:
            kind, *items = journal.unpack(record)
            _READERS[kind](found, *items)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"the journal cannot be read: {error!r}") from None
    return found


# --- one reader a kind ------------------------------------------------------


def _read_pool(
    found: Recovered, shape: tuple[Any, ...], sizes: tuple[int, int, int], generation: int
) -> None:
    block_size, num_blocks, found.num_host_blocks = sizes
    found.layout = PoolLayout(KvShape(*shape), block_size, num_blocks)
    found.generation = generation


def _read_sequences(found: Recovered, items: Iterable[tuple[Any, ...]]) -> None:
    for item in items:
        serial, sequence_id, namespace, tokens, num_prompt, num_cached, table, length, *rest = item
        computed, epoch, state, group, num_forked, sources, first_target, *rest = rest
        is_suspended, host_ids, has_tail = rest
        found.sequences[serial] = Sequence(
            sequence_id=sequence_id,
            serial=serial,
            tokens=_unbulk("i", tokens),
            num_prompt_tokens=num_prompt,
            num_cached_tokens=num_cached,
            block_ids=_unbulk("i", table),
            length=length,
            num_computed=computed,
            chain=Chain(Namespace(*namespace)),
            epoch=epoch,
            driver_state=state,
            group=group,
            may_share_tail=True,
            num_forked_blocks=num_forked,
            sources=_unbulk("i", sources),
            first_target=first_target,
            is_suspended=is_suspended,
            host_ids=_unbulk("i", host_ids),
            has_host_tail=has_tail,
        )
        found.next_serial = max(found.next_serial, serial + 1)


def _read_fork(found: Recovered, items: Iterable[tuple[Any, ...]]) -> None:
    layout = found.layout
    assert layout is not None
    for source_serial, serial, sequence_id, epoch, num_tokens in items:
        source = found.sequences[source_serial]
        fork = apply_fork(source, sequence_id, serial, epoch, num_tokens, layout.block_size)
        fork.chain = Chain(source.chain.namespace)
        found.sequences[serial] = fork
        found.next_serial = max(found.next_serial, serial + 1)


def _read_extend(found: Recovered, ends: bytes, tables: bytes) -> None:
    layout = found.layout
    assert layout is not None
    numbers = _unbulk("q", tables)
    at = 0
    while at < len(numbers):
        serial, first_index, count = numbers[at : at + 3]
        sequence = found.sequences[serial]
        if first_index < len(sequence.block_ids):
            apply_copy(sequence, first_index, layout.block_size)
        sequence.block_ids[first_index:] = array("i", numbers[at + 3 : at + 3 + count])
        at += 3 + count
    pairs = iter(_unbulk("q", ends))
    for serial, length in zip(pairs, pairs, strict=True):
        found.sequences[serial].length = length


def _read_commit(
    found: Recovered, numbers: bytes, tokens: bytes, states: Iterable[tuple[int, bytes]]
) -> None:
    new = _unbulk("i", tokens)
    triples = iter(_unbulk("q", numbers))
    at = 0
    for serial, num_computed, count in zip(triples, triples, triples, strict=True):
        sequence = found.sequences[serial]
        apply_commit(sequence, num_computed, new[at : at + count], None)
        del sequence.sources[:]
        at += count
    for serial, state in states:
        found.sequences[serial].driver_state = state


def _read_truncate(found: Recovered, cuts: Iterable[tuple[int, int]]) -> None:
    layout = found.layout
    assert layout is not None
    for serial, length in cuts:
        apply_truncate(found.sequences[serial], length, -(-length // layout.block_size))


def _read_close(found: Recovered, serials: Iterable[int]) -> None:
    for serial in serials:
        del found.sequences[serial]


def _read_namespace(found: Recovered, number: int, namespace: tuple[Any, ...]) -> None:
    found.namespaces[number] = Namespace(*namespace)


def _read_pin(found: Recovered, item: tuple[Any, ...]) -> None:
    pin_id, owner, namespace, tokens, priority, expires_at, epoch, num_blocks = item
    found.pins[pin_id] = Pin(
        pin_id=pin_id,
        owner=owner,
        tokens=_unbulk("i", tokens),
        priority=priority,
        expires_at=expires_at,
        chain=Chain(Namespace(*namespace)),
        block_ids=array("i"),
        num_blocks=num_blocks,
        epoch=epoch,
    )


def _read_unpin(found: Recovered, pin_ids: Iterable[str]) -> None:
    for pin_id in pin_ids:
        del found.pins[pin_id]


def _read_epoch(found: Recovered, epoch: int) -> None:
    found.epoch = epoch
    # What a lease does not adopt is closed before it is written down.
    for one in found.sequences.values():
        one.epoch = epoch if one.epoch else 0
    for pin in found.pins.values():
        pin.epoch = epoch if pin.epoch else 0


_READERS: dict[int, Callable[..., None]] = {
    journal.POOL: _read_pool,
    journal.SEQUENCES: _read_sequences,
    journal.FORK: _read_fork,
    journal.EXTEND: _read_extend,
    journal.COMMIT: _read_commit,
    journal.TRUNCATE: _read_truncate,
    journal.CLOSE: _read_close,
    journal.NAMESPACE: _read_namespace,
    journal.PIN: _read_pin,
    journal.UNPIN: _read_unpin,
    journal.EPOCH: _read_epoch,
}


def _unbulk(typecode: str, data: bytes) -> array[int]:
    numbers = array(typecode)
    numbers.frombytes(data)
    return numbers


# --- the other way round ----------------------------------------------------


def snapshot(state: PoolState) -> Iterator[bytes]:
    """Records of all that a state has, for a journal that begins with them."""
    for root in state.blocks.tree.roots():
        yield journal.namespace_record(root.number, root.namespace)
    for sequence in state.sequences.values():
        yield journal.sequences_record([sequence])
    for pin in state.pins.all():
        yield journal.pin_record(pin)
    yield journal.epoch_record(state.epoch)


def found_in(state: PoolState) -> Recovered:
    """A state as if it had been read from its journal."""
    for sequence in state.sequences.values():
        sequence.chain = Chain(sequence.chain.namespace)
        sequence.may_share_tail = True
    for pin in state.pins.all():
        pin.chain, pin.block_ids = Chain(pin.namespace), array("i")
    return Recovered(
        epoch=state.epoch,
        next_serial=state.next_serial,
        sequences={one.serial: one for one in state.sequences.values()},
        pins={pin.pin_id: pin for pin in state.pins.all()},
        namespaces={root.number: root.namespace for root in state.blocks.tree.roots()},
    )


# --- from that to a pool in use ---------------------------------------------


def rebuild(state: PoolState, found: Recovered) -> None:
    """Fill an empty state with what was found. The frame records are those of the last one."""
    blocks = state.blocks
    sequences = sorted(
        (one for one in found.sequences.values() if _is_sound(one, state)),
        key=lambda sequence: sequence.serial,
    )
    _restore_tree(blocks, found.namespaces)
    _count_references(blocks, sequences)
    _split_where_holders_change(blocks, sequences)
    _count_for_tenants(blocks, sequences)
    blocks.tenants.note_strain()
    _queue(blocks)
    for sequence in sequences:
        num_full = sequence.num_computed // state.block_size
        if num_full and not sequence.is_suspended:
            data = sequence.tokens[: num_full * state.block_size].tobytes()
            blocks.register(sequence.chain, sequence.block_ids[:num_full], data)
        state.add(sequence)
    state.next_serial = max(state.next_serial, found.next_serial)
    state.epoch = found.epoch
    for pin in found.pins.values():
        with contextlib.suppress(KvStoreError):  # other limits now; it takes what it can later
            pinning.take_blocks(state, pin)
        state.pins.put(pin)


def _is_sound(one: Sequence, state: PoolState) -> bool:
    """The sequence does not contradict itself. One that does is given up."""
    num_frames = state.blocks.frames.records.num_frames
    everything = [*one.block_ids, *one.sources, *one.host_ids]
    in_range = all(0 <= block < num_frames for block in everything)
    if one.is_suspended:
        return in_range and not one.block_ids
    return (
        in_range
        and len(one.block_ids) == state.num_blocks(one.length)
        and len(set(one.block_ids)) == len(one.block_ids)
        and one.num_computed <= min(one.length, len(one.tokens))
    )


def _restore_tree(blocks: BlockPool, namespaces: dict[int, Namespace]) -> None:
    """Build the tree of all findable blocks that can be reached; the others no longer are."""
    records = blocks.frames.records
    children = _children(records, namespaces)
    roots: dict[int, Root] = {}
    reached = np.zeros(records.num_frames, np.bool_)
    stack: list[tuple[Node, int]] = []
    for block in children.pop(NO_PARENT, ()):
        number = int(records.namespaces[block])
        if number not in roots:
            roots[number] = blocks.tree.restore_root(namespaces[number], number)
        stack.append((roots[number], block))
    blocks.tree.restored()
    while stack:
        parent, block = stack.pop()
        run = [block]
        following = children.get(block, ())
        is_host = blocks.frames.is_host(block)
        while len(following) == 1 and blocks.frames.is_host(following[0]) == is_host:
            run.append(following[0])
            following = children.get(run[-1], ())
        node = blocks.tree.restore(parent, array("i", run), records.tokens[run].tobytes())
        if node is not None:
            reached[run] = True
            stack += ((node, child) for child in following)
    blocks.frames.findable &= reached


def _children(records: FrameRecords, namespaces: dict[int, Namespace]) -> dict[int, list[int]]:
    """The findable blocks after each block, and those after none."""
    ids = np.flatnonzero(records.findable)
    parents = records.parents[ids]
    known = np.isin(records.namespaces[ids], np.array(list(namespaces), np.int32))
    has_parent = parents != NO_PARENT
    safe = np.where(has_parent, parents, 0)
    # A parent that was given to somebody else since is not the one that was meant.
    same = records.generations[safe] == records.parent_generations[ids]
    same &= records.namespaces[safe] == records.namespaces[ids]
    is_valid = known & (~has_parent | (same & records.findable[safe]))
    children: dict[int, list[int]] = {}
    for block, parent in zip(ids[is_valid].tolist(), parents[is_valid].tolist(), strict=True):
        children.setdefault(parent, []).append(block)
    return children


def _count_references(blocks: BlockPool, sequences: Iterable[Sequence]) -> None:
    counts = np.zeros(blocks.frames.records.num_frames, np.int32)
    for sequence in sequences:
        for part in (sequence.block_ids, sequence.sources, sequence.host_ids):
            np.add.at(counts, np.array(part, np.int32), 1)
    blocks.frames.recount(counts)


def _split_where_holders_change(blocks: BlockPool, sequences: Iterable[Sequence]) -> None:
    """Whoever holds a block of a node is to hold them all.

    Equal counts do not say so: two sequences that computed the same tokens at once may have
    one block each of what looks like one run.
    """
    counts = blocks.frames.ref_counts
    followers: NDArray[np.int32] = np.full(len(counts), -1, np.int32)  # within a node
    nodes = list(blocks.tree.walk())
    for node in nodes:
        ids = np.array(node.blocks, np.int32)
        followers[ids[:-1]] = ids[1:]
    holds_both = np.zeros(len(counts), np.int32)  # of a block and the next: who has both
    for sequence in sequences:
        for part in (sequence.block_ids, sequence.sources, sequence.host_ids):
            ids = np.array(part, np.int32)
            np.add.at(holds_both, ids[:-1][followers[ids[:-1]] == ids[1:]], 1)
    for node in nodes:
        members, start = node.blocks[:], node.start
        ids = np.array(members, np.int32)
        held, both = counts[ids], holds_both[ids[:-1]]
        for at in (np.flatnonzero((held[:-1] != both) | (held[1:] != both)) + 1).tolist():
            blocks.tree.separate(members[at], start + at)


def _count_for_tenants(blocks: BlockPool, sequences: Iterable[Sequence]) -> None:
    frames, num_blocks = blocks.frames, blocks.frames.num_blocks
    tenants: dict[Tenant, int] = {}
    owners: NDArray[np.int32] = np.full(num_blocks, -1, np.int32)
    for root in blocks.tree.roots():
        tenant = blocks.tenants.get(root.namespace.tenant)
        number = tenants.setdefault(tenant, len(tenants))
        of_root = frames.findable[:num_blocks] & (
            frames.records.namespaces[:num_blocks] == root.number
        )
        owners[of_root] = number
    for sequence in sequences:
        number = tenants.setdefault(blocks.tenant(sequence.chain), len(tenants))
        mine = np.array(sequence.block_ids + sequence.sources, np.int32)
        owners[mine[mine < num_blocks]] = number
    is_held = frames.ref_counts[:num_blocks] > 0
    for tenant, number in tenants.items():
        is_its = owners == number
        num_held = int(np.count_nonzero(is_its & is_held))
        tenant.count(held=num_held, cached=int(np.count_nonzero(is_its)) - num_held)


def _queue(blocks: BlockPool) -> None:
    """Let what nobody holds be evicted in the order in which it was last used."""
    last_uses = blocks.frames.records.last_uses
    blocks.clock = int(last_uses.max(initial=0))
    blocks.tree.split_nodes.clear()
    nodes = sorted(_by_use(blocks, last_uses), key=lambda pair: (pair[0], -pair[1].start))
    for _, node in nodes:
        queue = blocks.queue_of(node)
        queue.use([node])
        if not blocks.is_held(node):
            queue.push(node)


def _by_use(blocks: BlockPool, last_uses: NDArray[np.int64]) -> Iterator[tuple[int, Node]]:
    for node in blocks.tree.walk():
        yield int(last_uses[np.array(node.blocks, np.int32)].max()), node
