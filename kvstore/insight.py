"""What there is to see of a pool."""

from __future__ import annotations

from itertools import islice

from kvstore.errors import InvalidRequest
from kvstore.sequences import Sequence
from kvstore.state import PoolState
from kvstore.types import PoolStats, SequenceInfo

_DEFAULT_PAGE_SIZE = 100
_MAX_PAGE_SIZE = 1000


def list_sequences(
    state: PoolState | None, page_size: int, page_token: str, *, with_tokens: bool
) -> tuple[list[SequenceInfo], str]:
    """See PageManager.list_sequences."""
    if not 0 <= page_size <= _MAX_PAGE_SIZE:
        raise InvalidRequest("page_size", f"{page_size} is not from 0 to {_MAX_PAGE_SIZE}")
    if page_token and not (page_token.isascii() and page_token.isdigit()):
        raise InvalidRequest("page_token", f"{page_token!r} is not from an earlier answer")
    if state is None:
        return [], ""
    first = int(page_token or "0")
    rest = (one for one in state.sequences.values() if one.serial >= first)
    infos = [
        _info(one, with_tokens=with_tokens) for one in islice(rest, page_size or _DEFAULT_PAGE_SIZE)
    ]
    following = next(rest, None)
    return infos, "" if following is None else str(following.serial)


def stats(state: PoolState | None) -> PoolStats:
    """See PageManager.stats."""
    if state is None:
        return PoolStats()
    blocks, frames, host = state.blocks, state.blocks.frames, state.blocks.host
    num_held_slots = frames.num_held * state.block_size
    return PoolStats(
        num_blocks=frames.num_blocks,
        num_free=frames.num_free,
        num_cached=frames.num_cached,
        num_held=frames.num_held,
        num_pinned=sum(tenant.num_pinned for tenant in blocks.tenants.all()),
        num_sequences=len(state.sequences),
        num_suspended=sum(one.is_suspended for one in state.sequences.values()),
        num_pins=len(state.pins),
        num_waste_slots=state.num_waste_slots,
        waste_ratio=state.num_waste_slots / num_held_slots if num_held_slots else 0.0,
        num_prompt_tokens=state.num_prompt_tokens,
        num_hit_tokens=state.num_hit_tokens,
        num_evictions=blocks.evictions.total(),
        evictions=dict(blocks.evictions),
        num_host_blocks=host.num_blocks,
        num_host_free=frames.host.num_free,
        num_host_cached=frames.host.num_cached,
        num_host_evictions=host.num_evictions,
        num_demotions=host.num_demotions,
        prefill_tokens_per_s=state.costs.prefill_tokens_per_s,
        host_bytes_per_s=state.costs.host_bytes_per_s,
        swap=state.costs.stats.copy(),
        tenants=[tenant.usage() for tenant in blocks.tenants.all() if not tenant.is_idle],
    )


def _info(one: Sequence, *, with_tokens: bool) -> SequenceInfo:
    return SequenceInfo(
        one.sequence_id,
        one.length,
        one.num_computed,
        one.block_ids.tolist(),
        one.tokens.tolist() if with_tokens else [],
        one.driver_state,
        one.is_suspended,
        one.group,
    )
