"""docs/metrics.md lists every metric that the gateway exports, and no other."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.sessions import Sessions
from gateway.stats import Counters, EngineStats, PreemptionStats, SpeculationStats
from kvstore.types import PoolStats, TenantUsage
from services.gateway.metrics import Metrics

PAGE = Path(__file__).parents[4] / "docs" / "metrics.md"


@dataclass
class Entry:
    kind: str
    text: str
    labels: dict[str, set[str]] = field(default_factory=dict)  # and their values


@pytest.fixture
async def exported() -> dict[str, Entry]:
    """What a scrape gives when there is something of everything."""
    stats = PoolStats(
        num_blocks=8, num_host_blocks=4, tenants=[TenantUsage("acme", 1, 2, 1, 1, 1, 9, 3)]
    )

    async def kv_stats() -> PoolStats:
        return stats

    metrics = Metrics(kv_stats)
    metrics.add_engine(
        lambda: EngineStats(True, 0, 0, 0, PreemptionStats(), SpeculationStats(), Counters())
    )
    metrics.add_sessions(Sessions(None))
    metrics.grammars.labels("accepted")
    metrics.http_requests.labels("GET", "/metrics", "200")
    metrics.generations.labels("stop")
    text = (await metrics.scrape()).decode()
    found: dict[str, Entry] = {}
    name = help_text = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, help_text = line.split(" ", 3)[2:]
        elif line.startswith("# TYPE ") and not name.endswith("_created"):
            found[name] = Entry(line.split()[-1], help_text)
        elif not line.startswith("#") and name in found:
            for label, value in re.findall(r'(\w+)="([^"]*)"', line):
                if label != "le":  # of a histogram's buckets
                    found[name].labels.setdefault(label, set()).add(value)
    return found


@pytest.fixture(scope="module")
def documented() -> dict[str, Entry]:
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `quire_"):
            name, kind, labels, text = cells
            name = name.strip("`")
            assert name not in found, f"{name} is there twice"
            parts = re.findall(r"`(\w+)`(?: \(([^)]*)\))?", labels)
            found[name] = Entry(kind, text, {n: set(re.findall(r"\w+", v)) for n, v in parts})
    return found


def test_every_metric_is_documented_and_no_other(exported, documented):
    assert sorted(documented) == sorted(exported)


def test_types_labels_and_texts_are_those_of_the_code(exported, documented):
    for name, entry in documented.items():
        real = exported[name]
        assert entry.kind == real.kind, name
        assert entry.labels.keys() == real.labels.keys(), name
        assert entry.text.startswith(real.text), name
        for label, values in entry.labels.items():
            # Values that are few and known are listed, and then all of them are.
            assert values in (set(), real.labels[label]), name
