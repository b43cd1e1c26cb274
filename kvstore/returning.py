"""Bringing suspended sequences back to the page pool."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.errors import PromptExceedsPool, SequenceNotSuspended
from kvstore.opening import Found, check_room, copies_of, find
from kvstore.sequences import Sequence
from kvstore.state import PoolState
from kvstore.tenants import Tenant
from kvstore.types import BlockId, ResumedSequence


@dataclass(slots=True)
class _Return:
    """A sequence that is to come back, with what was found of it.

    Its table is: the hits; the `shared` ones, which others that come back take and which
    will hold the same tokens; the others, which it takes itself. What was found for the
    shared ones is left to those who take them.
    """

    sequence: Sequence
    tenant: Tenant
    found: Found
    num_blocks: int
    shared: list[_Place] = field(default_factory=list)
    source: _Return | None = None  # whose copies end within the shared ones; None: nobody's
    num_present: int = 0

    @property
    def first_own(self) -> int:
        return len(self.found.hits) + len(self.shared)


@dataclass(slots=True, eq=False)
class _Place:
    """A full block that is yet to be taken: whose it is, and where in its table."""

    taker: _Return
    index: int

    @property
    def block_id(self) -> BlockId:
        return self.taker.sequence.block_ids[self.index]


# By what comes before, a place or a block or a namespace, and the tokens in it.
_Places = dict[tuple[object, bytes], _Place]


def resume_sequences(
    state: PoolState, sequence_ids: Iterable[str], epoch: int, *, copies: bool, num_spare: int = 0
) -> list[ResumedSequence]:
    """See PageManager.resume_sequences. `num_spare` blocks must stay available."""
    returning: dict[str, _Return] = {}
    places: _Places = {}
    for sequence_id in sequence_ids:
        sequence = state.find(sequence_id, epoch)
        if not sequence.is_suspended:
            raise SequenceNotSuspended(sequence_id)
        if sequence_id not in returning:
            group = [_prepare(state, one, places, copies=copies) for one in state.group(sequence)]
            _check_possible(state, group)
            returning |= {one.sequence.sequence_id: one for one in group}
    back = list(returning.values())
    wanted = [(one.tenant, one.found, one.num_blocks - one.first_own) for one in back]
    check_room(state, wanted, num_spare)
    for one in back:
        state.blocks.hold(one.found.hits, one.tenant)
        state.blocks.hold(one.found.sources(), one.tenant)
    answers = [_resume(state, one) for one in back]
    state.journal.sequences([one.sequence for one in back])
    return answers


def _prepare(state: PoolState, sequence: Sequence, places: _Places, *, copies: bool) -> _Return:
    size = state.block_size
    namespace, computed = sequence.chain.namespace, sequence.num_computed
    tenant = state.blocks.tenants.get(namespace.tenant)
    # More than it had may be there by now, and copies that it never made. As with a prompt,
    # a token that is yet to be computed stays one.
    limit = max(computed, len(sequence.tokens) - 1)
    found = find(state, namespace, sequence.tokens, limit, copies=copies)
    if copies and sequence.has_host_tail and found.num_blocks == computed // size:
        found.alike, found.num_alike = sequence.host_ids[-1], computed % size
    one = _Return(sequence, tenant, found, state.num_blocks(len(sequence.tokens)))
    _share(one, places, limit // size, size)
    return one


def _share(one: _Return, places: _Places, last: int, size: int) -> None:
    """What members of a group had in common they have in common again.

    Otherwise a group that lives by sharing would not fit where it came from.
    """
    found, tokens = one.found, one.sequence.tokens
    before: object = found.hits[-1] if found.hits else one.sequence.chain.namespace
    for index in range(len(found.hits), last):
        key = before, tokens[index * size : (index + 1) * size].tobytes()
        place = places.setdefault(key, _Place(one, index))
        if place.taker is not one:
            one.shared.append(place)
        before = place
    num_found = len(found.host_hits)
    if num_found < len(one.shared):
        one.source = one.shared[num_found].taker
        found.num_alike = 0
    found.host_hits = found.host_hits[len(one.shared) :]


def _check_possible(state: PoolState, group: list[_Return]) -> None:
    """Raises PromptExceedsPool for what would not fit if nobody else were there."""
    most = max(state.blocks.tenants.most_blocks(one.tenant) for one in group)
    hits = {block_id for one in group for block_id in one.found.hits}
    needed = len(hits) + sum(one.num_blocks - one.first_own for one in group)
    if needed > most:
        raise PromptExceedsPool(needed=needed, total=most)


def _resume(state: PoolState, one: _Return) -> ResumedSequence:
    sequence, found, size = one.sequence, one.found, state.block_size
    shared = array("i", [place.block_id for place in one.shared])
    state.blocks.hold(shared, one.tenant)
    new = state.blocks.allocate(one.num_blocks - one.first_own, one.tenant)
    one.num_present = (one.first_own + len(found.host_hits)) * size + found.num_alike
    if one.source is not None:
        one.num_present = min(one.source.num_present, one.first_own * size)
    lost = state.costs.recompute_seconds(max(0, sequence.num_computed - one.num_present))
    state.costs.stats.recompute_actual_seconds += lost
    if sequence.host_ids:
        state.blocks.release_loose(sequence.host_ids, one.tenant)
    sequence.host_ids, sequence.has_host_tail = array("i"), False
    sequence.is_suspended = False
    sequence.block_ids = found.hits + shared + new
    sequence.length = len(sequence.tokens)
    sequence.num_computed = len(found.hits) * size
    sequence.chain = found.chain
    sequence.sources, sequence.first_target = found.sources(), one.first_own
    sequence.may_share_tail, sequence.num_forked_blocks = False, one.first_own
    for place in one.shared:
        taker = place.taker.sequence
        taker.num_forked_blocks = max(taker.num_forked_blocks, place.index + 1)
    state.num_waste_slots += state.waste(sequence)
    return ResumedSequence(
        sequence.sequence_id,
        sequence.block_ids.tolist(),
        sequence.length,
        one.num_present,
        copies_of(sequence),
    )
