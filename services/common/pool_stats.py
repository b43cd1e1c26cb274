"""Between GetStats and the page manager's counters, for both ends."""

from __future__ import annotations

from quire.kvstore.v1 import kvstore_pb2 as pb

from kvstore import types


def to_message(stats: types.PoolStats) -> pb.GetStatsResponse:
    message = pb.GetStatsResponse(
        total_block_count=stats.num_blocks,
        free_block_count=stats.num_free,
        cached_block_count=stats.num_cached,
        held_block_count=stats.num_held,
        sequence_count=stats.num_sequences,
        waste_slot_count=stats.num_waste_slots,
        waste_ratio=stats.waste_ratio,
        prompt_token_count=stats.num_prompt_tokens,
        hit_token_count=stats.num_hit_tokens,
        eviction_count=stats.num_evictions,
        eviction_counts=stats.evictions,
        pinned_block_count=stats.num_pinned,
        pin_count=stats.num_pins,
        suspended_sequence_count=stats.num_suspended,
        swap=_swap(stats),
        tenants=[_tenant(usage) for usage in stats.tenants],
        audit_count=stats.num_audits,
        audit_finding_count=stats.num_findings,
        is_journal_lost=not stats.is_journal_whole,
    )
    if stats.num_host_blocks:
        message.host.total_block_count = stats.num_host_blocks
        message.host.free_block_count = stats.num_host_free
        message.host.cached_block_count = stats.num_host_cached
        message.host.demotion_count = stats.num_demotions
        message.host.eviction_count = stats.num_host_evictions
    return message


def from_message(message: pb.GetStatsResponse) -> types.PoolStats:
    swap = message.swap
    return types.PoolStats(
        num_blocks=message.total_block_count,
        num_free=message.free_block_count,
        num_cached=message.cached_block_count,
        num_held=message.held_block_count,
        num_pinned=message.pinned_block_count,
        num_sequences=message.sequence_count,
        num_suspended=message.suspended_sequence_count,
        num_pins=message.pin_count,
        num_waste_slots=message.waste_slot_count,
        waste_ratio=message.waste_ratio,
        num_prompt_tokens=message.prompt_token_count,
        num_hit_tokens=message.hit_token_count,
        num_evictions=message.eviction_count,
        evictions=dict(message.eviction_counts),
        num_host_blocks=message.host.total_block_count,
        num_host_free=message.host.free_block_count,
        num_host_cached=message.host.cached_block_count,
        num_host_evictions=message.host.eviction_count,
        num_demotions=message.host.demotion_count,
        prefill_tokens_per_s=swap.prefill_tokens_per_second,
        host_bytes_per_s=swap.host_bytes_per_second,
        swap=types.SwapStats(
            num_swaps=swap.swap_count,
            num_recomputes=swap.recompute_count,
            swap_predicted_seconds=swap.swap_predicted_seconds,
            swap_actual_seconds=swap.swap_actual_seconds,
            recompute_predicted_seconds=swap.recompute_predicted_seconds,
            recompute_actual_seconds=swap.recompute_actual_seconds,
        ),
        tenants=[_usage(tenant) for tenant in message.tenants],
        num_audits=message.audit_count,
        num_findings=message.audit_finding_count,
        is_journal_whole=not message.is_journal_lost,
    )


def _swap(stats: types.PoolStats) -> pb.SwapStats:
    swap = stats.swap
    return pb.SwapStats(
        swap_count=swap.num_swaps,
        recompute_count=swap.num_recomputes,
        swap_predicted_seconds=swap.swap_predicted_seconds,
        swap_actual_seconds=swap.swap_actual_seconds,
        recompute_predicted_seconds=swap.recompute_predicted_seconds,
        recompute_actual_seconds=swap.recompute_actual_seconds,
        prefill_tokens_per_second=stats.prefill_tokens_per_s,
        host_bytes_per_second=stats.host_bytes_per_s,
    )


def _tenant(usage: types.TenantUsage) -> pb.TenantStats:
    return pb.TenantStats(
        tenant=usage.tenant,
        floor_block_count=usage.floor,
        quota_block_count=usage.quota,
        held_block_count=usage.num_held,
        cached_block_count=usage.num_cached,
        pinned_block_count=usage.num_pinned,
        prompt_token_count=usage.num_prompt_tokens,
        hit_token_count=usage.num_hit_tokens,
    )


def _usage(message: pb.TenantStats) -> types.TenantUsage:
    has_quota = message.HasField("quota_block_count")
    return types.TenantUsage(
        tenant=message.tenant,
        floor=message.floor_block_count,
        quota=message.quota_block_count if has_quota else None,
        num_held=message.held_block_count,
        num_cached=message.cached_block_count,
        num_pinned=message.pinned_block_count,
        num_prompt_tokens=message.prompt_token_count,
        num_hit_tokens=message.hit_token_count,
    )
