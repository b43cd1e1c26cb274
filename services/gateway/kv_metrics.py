"""The kvstore's counters as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvstore.types import PoolStats, TenantUsage

_PREFIX = "quire_kvstore_"


class KvCollector(Collector):
    """What the kvstore has said last. `stats` is None while it is out of reach."""

    def __init__(self) -> None:
        self.stats: PoolStats | None = None

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            _PREFIX + "up", "Whether the kvstore answered.", int(self.stats is not None)
        )
        if self.stats is not None:
            yield from _pool(self.stats)
            yield from _host(self.stats)
            yield from _swap(self.stats)
            yield from _tenants(self.stats)


def _pool(stats: PoolStats) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        _PREFIX + "blocks", "Blocks of the page pool by state.", labels=["state"]
    )
    for state, count in (
        ("free", stats.num_free),
        ("cached", stats.num_cached),
        ("held", stats.num_held),
    ):
        blocks.add_metric([state], count)
    yield blocks
    for name, text, value in (
        ("pinned_blocks", "Blocks held by pins, and maybe others too.", stats.num_pinned),
        ("pins", "Pins.", stats.num_pins),
        ("sequences", "Open sequences.", stats.num_sequences),
        ("suspended_sequences", "Those of them that are suspended.", stats.num_suspended),
        ("waste_slots", "Slots of own tails that hold no token.", stats.num_waste_slots),
        ("waste_ratio", "Their share of all held slots.", stats.waste_ratio),
        ("journal_whole", "1: a killed kvstore leaves everything.", int(stats.is_journal_whole)),
    ):
        yield GaugeMetricFamily(_PREFIX + name, text, value)
    for name, text, total in (
        ("prompt_tokens", "Prompt tokens of opened sequences.", stats.num_prompt_tokens),
        ("hit_tokens", "Those found in the cache.", stats.num_hit_tokens),
        ("audits", "Audits of the pool.", stats.num_audits),
        ("audit_findings", "What they found. Above 0: a bug.", stats.num_findings),
    ):
        yield CounterMetricFamily(_PREFIX + name, text, total)
    evictions = CounterMetricFamily(
        _PREFIX + "evictions", "Cached blocks whose KV was given up, by cause.", labels=["cause"]
    )
    for cause in ("room", "quota", "prefix"):
        evictions.add_metric([cause], stats.evictions.get(cause, 0))
    yield evictions


def _host(stats: PoolStats) -> Iterator[Metric]:
    if not stats.num_host_blocks:
        return
    blocks = GaugeMetricFamily(
        _PREFIX + "host_blocks", "Blocks of the host pool by state.", labels=["state"]
    )
    num_held = stats.num_host_blocks - stats.num_host_free - stats.num_host_cached
    blocks.add_metric(["free"], stats.num_host_free)
    blocks.add_metric(["cached"], stats.num_host_cached)
    blocks.add_metric(["held"], num_held)
    yield blocks
    for name, text, total in (
        ("demotions", "Blocks that went to the host pool.", stats.num_demotions),
        ("host_evictions", "Blocks given up there.", stats.num_host_evictions),
    ):
        yield CounterMetricFamily(_PREFIX + name, text, total)


def _swap(stats: PoolStats) -> Iterator[Metric]:
    swap = stats.swap
    suspensions = CounterMetricFamily(
        _PREFIX + "suspensions", "Suspended sequences by how they went.", labels=["mode"]
    )
    suspensions.add_metric(["swap"], swap.num_swaps)
    suspensions.add_metric(["recompute"], swap.num_recomputes)
    yield suspensions
    seconds = CounterMetricFamily(
        _PREFIX + "suspension_seconds",
        "What suspensions were predicted to cost; copies as timed, recomputing by its rate.",
        labels=["mode", "kind"],
    )
    for mode, kind, value in (
        ("swap", "predicted", swap.swap_predicted_seconds),
        ("swap", "actual", swap.swap_actual_seconds),
        ("recompute", "predicted", swap.recompute_predicted_seconds),
        ("recompute", "actual", swap.recompute_actual_seconds),
    ):
        seconds.add_metric([mode, kind], value)
    yield seconds
    for name, text, rate in (
        (
            "prefill_tokens_per_second",
            "Measured rate of prefills; nominal at first.",
            stats.prefill_tokens_per_s,
        ),
        (
            "host_bytes_per_second",
            "Measured rate of copies to and from the host pool; nominal at first.",
            stats.host_bytes_per_s,
        ),
    ):
        yield GaugeMetricFamily(_PREFIX + name, text, rate)


def _tenants(stats: PoolStats) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        _PREFIX + "tenant_blocks",
        "Blocks of each tenant by state, and its limits.",
        labels=["tenant", "kind"],
    )
    prompt = CounterMetricFamily(
        _PREFIX + "tenant_prompt_tokens", "Prompt tokens of each tenant.", labels=["tenant"]
    )
    hits = CounterMetricFamily(
        _PREFIX + "tenant_hit_tokens", "Those found in the cache.", labels=["tenant"]
    )
    for usage in stats.tenants:
        for kind, value in _kinds(usage):
            blocks.add_metric([usage.tenant, kind], value)
        prompt.add_metric([usage.tenant], usage.num_prompt_tokens)
        hits.add_metric([usage.tenant], usage.num_hit_tokens)
    yield from (blocks, prompt, hits)


def _kinds(usage: TenantUsage) -> Iterator[tuple[str, int]]:
    yield "held", usage.num_held
    yield "cached", usage.num_cached
    yield "pinned", usage.num_pinned
    yield "floor", usage.floor
    if usage.quota is not None:
        yield "quota", usage.quota
