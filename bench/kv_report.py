"""Hit ratios as a table and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def show(report: dict[str, Any]) -> None:
    """A row per policy, a column per capacity; the best policy of a column is bold."""
    rows = report["capacities"]
    table = Table(title=f"{report['trace']}: hit ratio, unlimited {report['unlimited']:.6f}")
    table.add_column("tokens")
    for row in rows:
        table.add_column(f"{row['tokens']:,}", justify="right")
    table.add_column("µs per block", justify="right")
    for name in rows[0]["hit_ratio"]:
        ratios = [_cell(row["hit_ratio"], name) for row in rows]
        costs = [row["microseconds_per_block"].get(name) for row in rows]
        cost = "" if None in costs else f"{sum(costs) / len(costs):.2f}"
        table.add_row(name, *ratios, cost)
    Console().print(table)


def _cell(ratios: dict[str, float], name: str) -> str:
    best = max(ratio for policy, ratio in ratios.items() if policy != "belady")
    text = f"{ratios[name]:.4f}"
    return f"[bold]{text}[/bold]" if ratios[name] == best and name != "belady" else text


def plot(report: dict[str, Any], path: Path) -> None:
    """Hit ratio over capacity, a line per policy, between LRU and what is possible at most."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    rows = report["capacities"]
    capacities = [row["tokens"] for row in rows]
    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=150)
    for name in rows[0]["hit_ratio"]:
        ratios = [row["hit_ratio"][name] for row in rows]
        style = {"color": "black", "linestyle": "--"} if name == "belady" else {}
        axes.plot(capacities, ratios, marker="o", markersize=4, label=name, **style)
    axes.axhline(report["unlimited"], color="grey", linestyle=":", label="unlimited")
    axes.set_xscale("log")
    axes.set_xticks(capacities)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens / 1e6:g}M"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("room, tokens")
    axes.set_ylabel("hit ratio")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{report['trace']}, {report['prompts']:,} prompts")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
