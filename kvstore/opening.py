"""Opening sequences: what a prompt finds in the cache, and what it needs beside that."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.errors import OutOfBlocks, PromptExceedsPool, QuotaExceeded, SequenceExists
from kvstore.prefix_tree import Chain
from kvstore.sequences import Sequence, check_plan
from kvstore.state import PoolState
from kvstore.tenants import Tenant
from kvstore.types import BlockCopy, BlockId, Namespace, OpenedSequence, OpenPlan


@dataclass(slots=True)
class Found:
    """What the pools have of a token list.

    `hits`: blocks of the page pool to share. `host_hits`: blocks of the host pool with what
    comes after them. `alike`: a block whose first `num_alike` tokens come after those.
    """

    chain: Chain
    hits: array[int]
    host_hits: array[int]
    alike: BlockId = 0
    num_alike: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.hits) + len(self.host_hits)

    def sources(self) -> array[int]:
        """Blocks that must be copied to new ones, in the order of their positions."""
        return self.host_hits + array("i", [self.alike] if self.num_alike else [])


@dataclass(slots=True)
class _Opening:
    plan: OpenPlan
    prompt: array[int]
    tenant: Tenant
    found: Found
    num_new_blocks: int
    table: array[int] = field(default_factory=lambda: array("i"))


def open_sequences(
    state: PoolState, plans: Iterable[OpenPlan], epoch: int, *, copies: bool, num_spare: int = 0
) -> list[OpenedSequence]:
    """See PageManager.open_sequences.

    `copies`: whoever calls can run copies. `num_spare` blocks must stay available.
    """
    openings: dict[str, _Opening] = {}
    answers: list[OpenedSequence | str] = []  # or the id of an opening
    for plan in plans:
        prompt = check_plan(plan)
        present = state.sequences.get(plan.sequence_id)
        if present is not None:
            if present.epoch != epoch or not present.is_opened_by(plan, prompt):
                raise SequenceExists(plan.sequence_id)
            answers.append(_answer(state, present))
            continue
        first = openings.get(plan.sequence_id)
        if first is None:
            first = _prepare(state, plan, prompt, copies=copies)
            openings[plan.sequence_id] = first
        if (first.prompt, first.plan.namespace) != (prompt, plan.namespace):
            raise SequenceExists(plan.sequence_id)
        answers.append(plan.sequence_id)
    wanted = [(o.tenant, o.found, o.num_new_blocks) for o in openings.values()]
    if wanted:
        check_room(state, wanted, num_spare)
    new = [_open(state, opening, epoch) for opening in _take(state, list(openings.values()))]
    state.journal.sequences(new)
    opened = {sequence.sequence_id: _answer(state, sequence) for sequence in new}
    return [opened[entry] if isinstance(entry, str) else entry for entry in answers]


def find(
    state: PoolState, namespace: Namespace, tokens: array[int], limit: int, *, copies: bool
) -> Found:
    """What the pools have of the first `limit` tokens. Nothing is held yet."""
    size, frames = state.block_size, state.blocks.frames
    data = tokens[: limit // size * size].tobytes()
    chain, blocks = state.blocks.match(namespace, data)
    num_hits = len(blocks)
    if frames.host.num_blocks:
        num_hits = next((at for at, b in enumerate(blocks) if frames.is_host(b)), num_hits)
    found = Found(chain, blocks[:num_hits], blocks[num_hits:] if copies else array("i"))
    if copies:
        rest = tokens[len(blocks) * size : limit][:size]
        alike, num_alike = state.blocks.tree.most_alike(chain, rest)
        if state.costs.copy_pays(num_alike):
            state.blocks.isolate(alike)
            found.alike, found.num_alike = alike, num_alike
    if num_hits < len(blocks):
        # Held as far as its own blocks go; the others are in the tree as the host pool's.
        state.blocks.tree.retreat(chain, num_hits)
    return found


def _prepare(state: PoolState, plan: OpenPlan, prompt: array[int], *, copies: bool) -> _Opening:
    num_blocks = state.num_blocks(len(prompt))
    tenant = state.blocks.tenants.get(plan.namespace.tenant)
    most = state.blocks.tenants.most_blocks(tenant)
    if num_blocks > most:
        raise PromptExceedsPool(needed=num_blocks, total=most)
    # One token must be left to compute: its logits are what the prompt is for.
    found = find(state, plan.namespace, prompt, len(prompt) - 1, copies=copies)
    return _Opening(plan, prompt, tenant, found, num_blocks - len(found.hits))


def check_room(
    state: PoolState, wanted: list[tuple[Tenant, Found, int]], num_spare: int = 0
) -> None:
    """Whether all fit beside what they share: for a tenant, what was found, new blocks.

    What is merely alike, and would have to be held while it is copied, is given up if that
    is what it takes.

    Raises:
        OutOfBlocks, QuotaExceeded
    """
    try:
        state.blocks.tenants.check_room(_needs(state, wanted), num_spare)
    except (OutOfBlocks, QuotaExceeded):
        is_host = state.blocks.frames.is_host
        alike = [found for _, found, _ in wanted if found.num_alike and not is_host(found.alike)]
        if not alike:
            raise
        for found in alike:
            found.num_alike = 0
        state.blocks.tenants.check_room(_needs(state, wanted), num_spare)


def _needs(state: PoolState, wanted: list[tuple[Tenant, Found, int]]) -> Counter[Tenant]:
    """Blocks that each tenant would hold more than now."""
    needs: Counter[Tenant] = Counter()
    matches: dict[Tenant, list[array[int]]] = {}
    for tenant, found, num_new in wanted:
        needs[tenant] += num_new
        matches.setdefault(tenant, []).append(found.hits)
        if found.num_alike and not state.blocks.frames.is_host(found.alike):
            matches[tenant].append(array("i", [found.alike]))
    for tenant, hits in matches.items():
        needs[tenant] += state.blocks.count_unheld(hits)
    return needs


def _take(state: PoolState, openings: list[_Opening]) -> list[_Opening]:
    # Every hit is held before anything is allocated, or one plan's allocation could
    # evict another's hits.
    for opening in openings:
        state.blocks.hold(opening.found.hits, opening.tenant)
        state.blocks.hold(opening.found.sources(), opening.tenant)
    for opening in openings:
        opening.table = opening.found.hits + state.blocks.allocate(
            opening.num_new_blocks, opening.tenant
        )
    return openings


def _open(state: PoolState, opening: _Opening, epoch: int) -> Sequence:
    size, found, prompt = state.block_size, opening.found, opening.prompt
    num_cached = found.num_blocks * size + found.num_alike
    sequence = Sequence(
        sequence_id=opening.plan.sequence_id,
        serial=state.next_serial,
        tokens=prompt,
        num_prompt_tokens=len(prompt),
        num_cached_tokens=num_cached,
        block_ids=opening.table,
        length=len(prompt),
        # What is yet to be copied counts when it is committed.
        num_computed=len(found.hits) * size,
        chain=found.chain,
        epoch=epoch,
        driver_state=opening.plan.driver_state,
        group=opening.plan.group,
        sources=found.sources(),
        first_target=len(found.hits),
    )
    state.add(sequence)
    if not opening.plan.is_resumption:
        opening.tenant.num_prompt_tokens += len(prompt)
        opening.tenant.num_hit_tokens += num_cached
        state.num_prompt_tokens += len(prompt)
        state.num_hit_tokens += num_cached
    return sequence


def _answer(state: PoolState, sequence: Sequence) -> OpenedSequence:
    table = sequence.block_ids[: state.num_blocks(sequence.num_prompt_tokens)]
    return OpenedSequence(
        sequence.sequence_id, table.tolist(), sequence.num_cached_tokens, copies_of(sequence)
    )


def copies_of(sequence: Sequence) -> list[BlockCopy]:
    """What is to be copied for a sequence before its next chunk."""
    targets = sequence.block_ids[sequence.first_target :]
    return list(map(BlockCopy, sequence.sources, targets))
