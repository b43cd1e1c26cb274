"""One screen of what is in a page pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kvstore.v1 import kvstore_pb2 as pb
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from kvstore.types import PoolStats, TenantUsage
from services.cli.printable import one_line

MOST_ROWS = 10  # of pins, of tenants and of sequences
_LABEL_WIDTH = 11

# What stands for a state in a bar, and its colour. They can be told apart without colours.
_HELD, _CACHED, _FREE, _PINNED = ("█", "cyan"), ("▒", "green"), ("·", "dim"), ("▓", "magenta")


@dataclass(frozen=True)
class PoolView:
    """What a kvstore said at about one instant."""

    address: str
    stats: PoolStats
    pins: Sequence[pb.PinInfo]
    sequences: Sequence[pb.SequenceInfo]


class Bar:
    """Counts as parts of a line, each with its name below."""

    def __init__(self, parts: Sequence[tuple[str, int, tuple[str, str]]]) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line, legend = Text(no_wrap=True), Text()
        total = sum(count for _, count, _ in self._parts)
        drawn = done = 0
        for name, count, (mark, style) in self._parts:
            done += count
            # What there is at all is seen: at least one character each.
            end = max(round(done * options.max_width / max(total, 1)), drawn + bool(count))
            end = min(end, options.max_width)
            line.append(mark * (end - drawn), style)
            drawn = end
            legend.append(f"{mark} ", style)
            legend.append(f"{name} {count:,}  ")
        legend.append(f"of {total:,}", "dim")
        yield line
        yield legend


def render(view: PoolView) -> RenderableType:
    """Everything there is to see of a pool."""
    stats = view.stats
    title = Text(f"page pool of {view.address}", "bold")
    if not stats.num_blocks:
        return Group(title, Text(), Text("No compute worker has attached a pool yet."))
    facts = Table.grid(padding=(0, 1), expand=True)
    facts.add_column(width=_LABEL_WIDTH, style="dim")
    facts.add_column(ratio=1)
    facts.add_row("blocks", _blocks(stats))
    if stats.num_host_blocks:
        facts.add_row("host pool", _host_blocks(stats))
    facts.add_row()
    for label, text in (
        ("hits", _hits(stats)),
        (
            "waste",
            f"{_count(stats.num_waste_slots, 'slot')} of what is held, {stats.waste_ratio:.1%}",
        ),
        ("evicted", _evicted(stats)),
        ("suspended", _suspended(stats)),
        ("audits", _audits(stats)),
    ):
        facts.add_row(label, Text(text))
    parts: list[RenderableType] = [title, Text(), facts]
    for table in (_tenants(stats.tenants), _pins(view), _sequences(view)):
        if table is not None:
            parts += (Text(), table)
    return Group(*parts)


def _blocks(stats: PoolStats) -> Bar:
    # A pinned block is a held one.
    return Bar(
        (
            ("pinned", stats.num_pinned, _PINNED),
            ("other held", stats.num_held - stats.num_pinned, _HELD),
            ("cached", stats.num_cached, _CACHED),
            ("free", stats.num_free, _FREE),
        )
    )


def _host_blocks(stats: PoolStats) -> Bar:
    num_held = stats.num_host_blocks - stats.num_host_cached - stats.num_host_free
    return Bar(
        (
            ("held", num_held, _HELD),
            ("cached", stats.num_host_cached, _CACHED),
            ("free", stats.num_host_free, _FREE),
        )
    )


def _hits(stats: PoolStats) -> str:
    return (
        f"{_ratio(stats.num_hit_tokens, stats.num_prompt_tokens)} of "
        f"{stats.num_prompt_tokens:,} prompt tokens were in the cache"
    )


def _evicted(stats: PoolStats) -> str:
    causes = [
        f"{count:,} for {cause}"
        for cause, count in sorted(stats.evictions.items(), key=lambda item: -item[1])
        if count
    ]
    text = _count(stats.num_evictions, "block")
    if causes:
        text += f": {', '.join(map(one_line, causes))}"
    if stats.num_host_blocks:
        text += (
            f"; {stats.num_demotions:,} went to the host pool, "
            f"{stats.num_host_evictions:,} were evicted there"
        )
    return text


def _suspended(stats: PoolStats) -> str:
    swap = stats.swap
    text = f"{stats.num_suspended:,} of {_count(stats.num_sequences, 'sequence')} now"
    for count, name, predicted, actual in (
        (swap.num_swaps, "swapped", swap.swap_predicted_seconds, swap.swap_actual_seconds),
        (
            swap.num_recomputes,
            "recomputed",
            swap.recompute_predicted_seconds,
            swap.recompute_actual_seconds,
        ),
    ):
        if count:
            text += (
                f"\n{count:,} {name} so far: {_seconds(predicted)} predicted, "
                f"{_seconds(actual)} actual"
            )
    return text


def _audits(stats: PoolStats) -> str:
    found = "nothing found" if not stats.num_findings else f"{stats.num_findings:,} findings"
    return f"{stats.num_audits:,} so far, {found}"


def _tenants(tenants: Sequence[TenantUsage]) -> Table | None:
    if not any(usage.tenant for usage in tenants):
        return None  # there are only those without a name, who have no limits either
    table = _table(("tenant",), ("floor", "quota", "held", "cached", "pinned", "hit ratio"))
    for usage in tenants[:MOST_ROWS]:
        table.add_row(
            _name(usage.tenant),
            f"{usage.floor:,}",
            "none" if usage.quota is None else f"{usage.quota:,}",
            f"{usage.num_held:,}",
            f"{usage.num_cached:,}",
            f"{usage.num_pinned:,}",
            _ratio(usage.num_hit_tokens, usage.num_prompt_tokens),
        )
    _add_rest(table, len(tenants))
    return table


def _pins(view: PoolView) -> Table | None:
    if not view.pins:
        return None
    numbers = ("priority", "time left", "tokens", "present")
    table = _table(("pin", "owner", "tenant"), numbers)
    for pin in view.pins[:MOST_ROWS]:
        table.add_row(
            _name(pin.pin_id),
            _name(pin.owner),
            _name(pin.tenant),
            str(pin.priority),
            _seconds(pin.ttl.seconds),
            f"{pin.token_count:,}",
            _ratio(pin.cached_token_count, pin.token_count),
        )
    _add_rest(table, view.stats.num_pins)
    return table


def _sequences(view: PoolView) -> Table | None:
    if not view.sequences:
        return None
    table = _table(("oldest sequences", "owner", "state"), ("tokens", "computed", "blocks"))
    for one in view.sequences:
        table.add_row(
            _name(one.sequence_id),
            "driver" if one.is_driven else "client",
            "suspended" if one.is_suspended else "resident",
            f"{one.length:,}",
            f"{one.computed_token_count:,}",
            f"{len(one.block_ids):,}",
        )
    _add_rest(table, view.stats.num_sequences, len(view.sequences))
    return table


def _table(names: Sequence[str], numbers: Sequence[str]) -> Table:
    """Columns of texts, which are cut if need be, and then of numbers, which are not."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for name in names:
        # Only columns that may wrap are made narrower, so it is the texts that may not.
        header = Text(name, no_wrap=True)
        table.add_column(header, overflow="ellipsis", max_width=40)
    for name in numbers:
        table.add_column(name, no_wrap=True, justify="right", min_width=len(name))
    return table


def _add_rest(table: Table, total: int, num_shown: int = MOST_ROWS) -> None:
    if total > num_shown:
        table.add_row(Text(f"and {total - num_shown:,} more", "dim"))


def _name(text: str) -> Text:
    return Text(one_line(text), no_wrap=True) if text else Text("(none)", "dim")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
