"""Taking, keeping and releasing pins."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from kvstore.errors import (
    InvalidRequest,
    KvStoreError,
    PinBudgetExceeded,
    PinExists,
    PinNotFound,
    SequenceNotFound,
)
from kvstore.pin_book import Pin
from kvstore.prefix_tree import Chain
from kvstore.sequences import check_id, check_tokens
from kvstore.state import PoolState
from kvstore.types import Namespace, PinInfo, PinPlan

MIN_TTL, MAX_TTL = 1.0, 7 * 86_400.0
MAX_PRIORITY = 1000


def pin_prefix(state: PoolState, plan: PinPlan, epoch: int, now: float) -> PinInfo:
    """See PageManager.pin_prefix."""
    check_id(plan.pin_id, "pin_id")
    check_id(plan.owner, "owner")
    _check_ttl(plan.ttl_seconds)
    if not -MAX_PRIORITY <= plan.priority <= MAX_PRIORITY:
        raise InvalidRequest("priority", f"{plan.priority} is not within ±{MAX_PRIORITY}")
    namespace, tokens = _prefix(state, plan)
    present = state.pins.get(plan.pin_id)
    if present is not None:
        if (present.namespace, present.tokens, present.owner) != (namespace, tokens, plan.owner):
            raise PinExists(plan.pin_id)
        present.priority = plan.priority
        return renew_pin(state, plan.pin_id, plan.ttl_seconds, now)
    pin = Pin(
        pin_id=plan.pin_id,
        owner=plan.owner,
        tokens=tokens,
        priority=plan.priority,
        expires_at=now + plan.ttl_seconds,
        chain=Chain(namespace),
        block_ids=array("i"),
        num_blocks=len(tokens) // state.block_size,
        epoch=epoch,
    )
    weaker = _must_yield(state, pin)
    sequence = state.sequences.get(plan.sequence_id)
    if sequence is not None and not sequence.is_suspended:
        # What it shared with others may have left with them: its own blocks take their place.
        state.publish(sequence)
    take_blocks(state, pin)
    release(state, weaker)
    state.pins.put(pin)
    state.journal.pin(pin)
    return info(state, pin, now)


def renew_pin(state: PoolState, pin_id: str, ttl_seconds: float, now: float) -> PinInfo:
    """See PageManager.renew_pin."""
    _check_ttl(ttl_seconds)
    pin = state.pins.get(pin_id)
    if pin is None:
        raise PinNotFound(pin_id)
    pin.expires_at = now + ttl_seconds
    state.pins.put(pin)
    state.journal.pin(pin)
    return info(state, pin, now)


def unpin(state: PoolState, chosen: Callable[[Pin], bool]) -> int:
    """Release the pins that are chosen; how many there were."""
    pins = [pin for pin in state.pins.all() if chosen(pin)]
    release(state, pins)
    return len(pins)


def release(state: PoolState, pins: Iterable[Pin]) -> None:
    """End pins; their blocks are as evictable as any."""
    pins = list(pins)
    if not pins:
        return
    state.journal.unpin([pin.pin_id for pin in pins])
    for pin in pins:
        state.pins.remove(pin)
        state.blocks.unpin(pin.chain, pin.block_ids)


def expire(state: PoolState, now: float) -> None:
    """End the pins whose time is over."""
    release(state, state.pins.expired(now))


def advance(state: PoolState, namespace: Namespace) -> None:
    """There are new blocks in a namespace: pins may have waited for them."""
    for pin in state.pins.waiting(namespace):
        try:
            take_blocks(state, pin)
        except KvStoreError:
            continue  # its tenant has no room for it now; there will be other blocks
        state.pins.put(pin)


def take_blocks(state: PoolState, pin: Pin) -> None:
    """Hold what there is of a pin's prefix and it does not hold yet.

    Raises:
        OutOfBlocks, QuotaExceeded: others have a floor that must be left to them.
    """
    chain, blocks = state.blocks.match(pin.namespace, pin.tokens.tobytes())
    is_host = state.blocks.frames.is_host
    count = next((at for at, block in enumerate(blocks) if is_host(block)), len(blocks))
    if count <= len(pin.block_ids):
        return
    if count < len(blocks):
        state.blocks.tree.retreat(chain, count)
    new = blocks[len(pin.block_ids) : count]
    tenant = state.blocks.tenant(chain)
    state.blocks.tenants.check_room({tenant: state.blocks.count_unheld([new])})
    state.blocks.pin(new, tenant)
    pin.chain, pin.block_ids = chain, blocks[:count]


def yield_one(state: PoolState) -> bool:
    """Release the pin that matters least, for a request that could not run beside it."""
    holding = [pin for pin in state.pins.weakest_first() if pin.block_ids]
    release(state, holding[:1])
    return bool(holding)


def info(state: PoolState, pin: Pin, now: float) -> PinInfo:
    return PinInfo(
        pin_id=pin.pin_id,
        owner=pin.owner,
        tenant=pin.namespace.tenant,
        priority=pin.priority,
        ttl_seconds=max(0.0, pin.expires_at - now),
        num_tokens=pin.num_blocks * state.block_size,
        num_cached_tokens=len(pin.block_ids) * state.block_size,
    )


def _prefix(state: PoolState, plan: PinPlan) -> tuple[Namespace, array[int]]:
    """The whole blocks that a plan asks for."""
    if plan.sequence_id:
        sequence = state.sequences.get(plan.sequence_id)
        if sequence is None:
            raise SequenceNotFound(plan.sequence_id)
        namespace, tokens = sequence.chain.namespace, sequence.tokens[: sequence.num_computed]
    elif plan.namespace is None:
        raise InvalidRequest("prefix", "give tokens with a namespace, or a sequence")
    else:
        namespace, tokens = plan.namespace, check_tokens(plan.token_ids)
    count = len(tokens) // state.block_size
    if not count:
        field = "sequence_id" if plan.sequence_id else "token_ids"
        raise InvalidRequest(field, f"{len(tokens)} tokens fill no block of {state.block_size}")
    return namespace, tokens[: count * state.block_size]


def _check_ttl(seconds: float) -> None:
    if not MIN_TTL <= seconds <= MAX_TTL:
        raise InvalidRequest("ttl", f"{seconds} s is not from {MIN_TTL:g} s to {MAX_TTL:g} s")


def _must_yield(state: PoolState, pin: Pin) -> list[Pin]:
    """Weaker pins that must go for a new one to be within the budgets.

    Raises:
        PinBudgetExceeded: that would not be enough.
    """
    tenant = pin.namespace.tenant
    total, own = state.pins.num_blocks(), state.pins.num_blocks(tenant)
    most_total, most_own = state.options.most_pinned, state.options.most_pinned_by_tenant
    yielding = []
    for other in state.pins.weakest_first():
        over_total = total + pin.num_blocks > most_total
        over_own = own + pin.num_blocks > most_own
        if not (over_total or over_own) or other.priority >= pin.priority:
            break
        is_own = other.namespace.tenant == tenant
        if over_total or is_own:
            yielding.append(other)
            total -= other.num_blocks
            own -= other.num_blocks if is_own else 0
    if total + pin.num_blocks > most_total or own + pin.num_blocks > most_own:
        raise PinBudgetExceeded(
            tenant, needed=pin.num_blocks, pinned=own, budget=min(most_own, most_total)
        )
    return yielding
