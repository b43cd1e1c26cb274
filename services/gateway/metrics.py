"""What the gateway reports to Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.sessions import Sessions
from gateway.stats import EngineStats
from kvstore.types import PoolStats
from services.gateway.kv_metrics import KvCollector

KvStats = Callable[[], Awaitable[PoolStats]]

# Seconds. Fine where people notice, up to a long queue.
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# A scrape must not hang on a kvstore that does.
_KV_STATS_TIMEOUT = 1.0


class Metrics:
    """Counters and histograms of one gateway, in a registry of their own."""

    def __init__(self, kv_stats: KvStats | None = None) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self._kv_stats = kv_stats
        self._kv = KvCollector()
        if kv_stats is not None:
            registry.register(self._kv)
        self.http_requests = Counter(
            "quire_http_requests",
            "Finished HTTP requests. Status 499: the client left.",
            ("method", "route", "status"),
            registry=registry,
        )
        self.generations = Counter(
            "quire_generations",
            "Ended generations: stop, length, cancelled, abandoned, refused or error.",
            ("outcome",),
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "quire_prompt_tokens", "Prompt tokens of started generations.", registry=registry
        )
        self.cached_tokens = Counter(
            "quire_cached_prompt_tokens", "Those found in the cache.", registry=registry
        )
        self.generated_tokens = Counter(
            "quire_generated_tokens", "Tokens sent to clients.", registry=registry
        )
        self.grammars = Counter(
            "quire_grammars",
            "Structures that answers were asked to have: accepted or refused.",
            ("outcome",),
            registry=registry,
        )
        self.first_token = Histogram(
            "quire_time_to_first_token_seconds",
            "From the request to its first token.",
            buckets=_FIRST,
            registry=registry,
        )
        self.between_tokens = Histogram(
            "quire_inter_token_latency_seconds",
            "Between two deliveries of tokens, per token.",
            buckets=_BETWEEN,
            registry=registry,
        )
        self.whole = Histogram(
            "quire_generation_seconds",
            "From the request to the end of its answer.",
            buckets=_WHOLE,
            registry=registry,
        )

    def add_engine(self, stats: Callable[[], EngineStats]) -> None:
        """Report an engine's statistics with every scrape."""
        self._registry.register(_EngineCollector(stats))

    def add_sessions(self, sessions: Sessions) -> None:
        """Report sessions with every scrape."""
        self._registry.register(_SessionCollector(sessions))

    async def scrape(self) -> bytes:
        """All metrics in Prometheus' text format, the kvstore's as of now."""
        if self._kv_stats is not None:
            try:
                stats: PoolStats | None = await asyncio.wait_for(
                    self._kv_stats(), _KV_STATS_TIMEOUT
                )
            except Exception:  # whatever it is, the other metrics are worth having
                stats = None
            self._kv.stats = stats
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Numbers that the engine counts itself."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        counters = stats.counters
        for name, text, value in (
            ("ready", "Whether steps make progress.", int(stats.is_ready)),
            ("requests_running", "Admitted generations.", stats.num_running),
            ("requests_waiting", "Queued generations.", stats.num_waiting),
        ):
            yield GaugeMetricFamily(f"quire_{name}", text, value)
        preempted, guessed = stats.preemptions, stats.speculation
        for name, text, total in (
            ("preemptions", "Requests whose sequences were suspended.", preempted.num_groups),
            ("sequences_swapped", "Suspended with their KV in host memory.", preempted.num_swapped),
            (
                "sequences_recomputed",
                "Suspended without their KV, which is computed again.",
                preempted.num_recomputed,
            ),
            ("sequences_resumed", "Suspended ones that came back.", preempted.num_resumed),
            ("drafted_tokens", "Next tokens that were guessed.", guessed.num_drafted),
            ("accepted_tokens", "Guesses that were right.", guessed.num_accepted),
            ("steps", "Steps that compute ran.", counters.num_steps),
            ("step_tokens", "Tokens in them, prompts included.", counters.num_step_tokens),
            ("step_seconds", "Time that compute spent on them.", counters.step_seconds),
            ("kvstore_updates", "Calls to the kvstore.", counters.num_updates),
            ("reconnects", "Times that workers were lost and found.", counters.num_reconnects),
        ):
            yield CounterMetricFamily(f"quire_{name}", text, total)


class _SessionCollector(Collector):
    """Sessions as they are, and what became of their pins."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def collect(self) -> Iterator[Metric]:
        sessions = self._sessions
        yield GaugeMetricFamily("quire_sessions", "Kept sessions.", len(sessions))
        yield GaugeMetricFamily("quire_session_tokens", "Their tokens.", sessions.num_tokens)
        pins = CounterMetricFamily(
            "quire_session_pins",
            "Pins asked for or renewed for sessions: taken or refused.",
            labels=("outcome",),
        )
        pins.add_metric(["taken"], sessions.num_pins)
        pins.add_metric(["refused"], sessions.num_refused_pins)
        yield pins
