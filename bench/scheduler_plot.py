"""Curves of a simulated run: queue, batch, blocks and preemptions over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from bench.scheduler_sim import Samples

_NUM_BINS = 400


def draw(samples: Samples, num_blocks: int, title: str, path: Path) -> None:
    """Write a PNG. Each point is the mean, and the band the least and most, of a bin."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    at = np.array(samples.at)
    steps = np.diff(np.concatenate(([0], samples.preemptions)))
    held = 100 * np.array(samples.held_blocks) / num_blocks
    curves = [
        ("requests that wait", np.array(samples.waiting), "tab:orange"),
        ("sequences that run", np.array(samples.running), "tab:blue"),
        ("prompt tokens in a step", np.array(samples.prompt_tokens), "tab:green"),
        ("blocks held, % of the pool", held, "tab:purple"),
        ("groups suspended, in all", np.cumsum(steps), "tab:red"),
    ]
    figure, axes = plt.subplots(len(curves), 1, figsize=(9, 9), sharex=True, layout="constrained")
    figure.suptitle(title)
    edges = np.linspace(at[0], at[-1], _NUM_BINS + 1)
    bins = np.clip(np.digitize(at, edges) - 1, 0, _NUM_BINS - 1)
    middles = (edges[:-1] + edges[1:]) / 2
    for axis, (label, values, color) in zip(axes, curves, strict=True):
        present = np.unique(bins)
        groups = [values[bins == number] for number in present]
        axis.fill_between(
            middles[present],
            [group.min() for group in groups],
            [group.max() for group in groups],
            color=color,
            alpha=0.2,
            linewidth=0,
        )
        axis.plot(middles[present], [group.mean() for group in groups], color=color, linewidth=1)
        axis.set_title(label, loc="left", fontsize=10)
        axis.set_ylim(0, max(1, axis.get_ylim()[1]))
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("seconds of the simulation")
    figure.savefig(path, dpi=110)
    plt.close(figure)
