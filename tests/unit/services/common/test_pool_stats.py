"""GetStats: no counter is lost or mixed up on the way."""

from __future__ import annotations

import dataclasses
import itertools

from kvstore.types import PoolStats, SwapStats, TenantUsage
from services.common import pool_stats


def numbered(kind, numbers, **others):
    """An object whose fields all differ."""
    values = {
        field.name: others.get(field.name, next(numbers)) for field in dataclasses.fields(kind)
    }
    return kind(**values)


def test_every_counter_arrives_as_itself():
    numbers = itertools.count(1)
    tenants = [
        numbered(TenantUsage, numbers, tenant="a"),
        numbered(TenantUsage, numbers, tenant="", quota=None),
    ]
    stats = numbered(
        PoolStats,
        numbers,
        evictions={"room": 7, "quota": 2},
        swap=numbered(SwapStats, numbers),
        tenants=tenants,
        is_journal_whole=False,
    )
    assert pool_stats.from_message(pool_stats.to_message(stats)) == stats


def test_a_pool_without_a_host_pool_says_so():
    message = pool_stats.to_message(PoolStats(num_blocks=3))
    assert not message.HasField("host")
    assert pool_stats.from_message(message) == PoolStats(num_blocks=3, tenants=[])
