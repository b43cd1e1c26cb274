"""`quire fsck`: every invariant of a running kvstore's pool, checked from scratch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from quire.kvstore.v1 import kvstore_pb2 as pb
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.types import PoolStats
from services.cli.kvstore_client import KvStoreClient, KvStoreSilent
from services.cli.printable import one_line
from services.common import config


def main(arguments: list[str]) -> int:
    """The exit status is 0 (nothing is wrong any more), 1 (something is) or 2 (no answer)."""
    settings = config.load(config.FsckSettings, "fsck", arguments)
    try:
        with KvStoreClient(settings.kvstore) as kvstore:
            report = kvstore.audit(repair=settings.repair)
            stats = kvstore.stats()
    except KvStoreSilent as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2
    remaining = report.remaining_findings if settings.repair else report.findings
    if settings.as_json:
        print(json.dumps(_as_json(kvstore.address, stats, report, is_repair=settings.repair)))
    else:
        _show(Console(highlight=False), kvstore.address, stats, report, is_repair=settings.repair)
    return 1 if remaining else 0


def _show(
    console: Console,
    address: str,
    stats: PoolStats,
    report: pb.AuditPoolResponse,
    *,
    is_repair: bool,
) -> None:
    if not report.findings:
        console.print(Text(f"{address}: {_all_is_well(stats)}"), soft_wrap=True)
        return
    console.print(_table("found", report.findings))
    if not is_repair:
        text = f"{_findings(len(report.findings))}. To repair: quire fsck --repair"
    elif report.remaining_findings:
        console.print(Text())
        console.print(_table("left after the repair", report.remaining_findings))
        num_left = len(report.remaining_findings)
        text = f"{_findings(len(report.findings))}, {num_left} left after the repair."
    else:
        text = f"{_findings(len(report.findings))}, all repaired."
    console.print(Text(f"\n{address}: {text}"), soft_wrap=True)


def _all_is_well(stats: PoolStats) -> str:
    if not stats.num_blocks:
        return "all is well: no pool is attached yet."
    return (
        f"all is well: {stats.num_blocks:,} blocks ({stats.num_free:,} free, "
        f"{stats.num_cached:,} cached, {stats.num_held:,} held), "
        f"{stats.num_sequences:,} sequences, {stats.num_pins:,} pins."
    )


def _findings(count: int) -> str:
    return "1 finding" if count == 1 else f"{count} findings"


def _table(title: str, findings: Iterable[pb.AuditFinding]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    table.add_column("about", no_wrap=True)
    table.add_column(title, overflow="fold")
    for finding in findings:
        table.add_row(Text(one_line(finding.kind)), Text(one_line(finding.message)))
    return table


def _as_json(
    address: str, stats: PoolStats, report: pb.AuditPoolResponse, *, is_repair: bool
) -> dict[str, object]:
    """`remaining_findings` is null if no repair was asked for."""
    remaining = [_finding(one) for one in report.remaining_findings] if is_repair else None
    return {
        "kvstore": address,
        "num_blocks": stats.num_blocks,
        "num_free": stats.num_free,
        "num_cached": stats.num_cached,
        "num_held": stats.num_held,
        "num_sequences": stats.num_sequences,
        "num_pins": stats.num_pins,
        "findings": [_finding(one) for one in report.findings],
        "remaining_findings": remaining,
    }


def _finding(finding: pb.AuditFinding) -> dict[str, str]:
    return {"kind": finding.kind, "message": finding.message}
