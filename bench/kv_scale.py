"""Whether the page manager's time per operation and memory per block stay as pools grow.

Each pool is filled with prompts that share nothing; then prompts come and go in a full
pool, so that each one evicts others.

    python -m bench.kv_scale
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import time
from array import array
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from kvstore.attachment import ManagerOptions
from kvstore.fakes import FakeStorage
from kvstore.manager import PageManager
from kvstore.types import CommitPlan, ExtendPlan, KvShape, Namespace, OpenPlan

SHAPE = KvShape(num_layers=1, num_kv_heads=1, head_size=8, dtype="bfloat16")
NAMESPACE = Namespace(b"bench")
BLOCK_SIZE = 16


def prompt(number: int, num_blocks: int) -> array[int]:
    """Tokens that no other number's prompt begins with."""
    tokens = np.arange(num_blocks * BLOCK_SIZE, dtype=np.int32)
    tokens[0] = number
    return array("i", tokens.tobytes())


class Pool:
    """A manager whose prompts have `num_blocks` blocks each."""

    def __init__(self, size: int, num_blocks: int, eviction: str) -> None:
        self._num_blocks = num_blocks
        options = ManagerOptions(
            size * BLOCK_SIZE * SHAPE.token_bytes, BLOCK_SIZE, eviction=eviction
        )
        self.manager = PageManager(options, FakeStorage())
        self.manager.attach_pool(SHAPE)
        self._number = 0
        self.seconds = dict.fromkeys(("open", "publish", "extend", "close"), 0.0)
        self.num_prompts = 0

    def come_and_go(self) -> None:
        """One prompt from its opening to its end."""
        self._number += 1
        self.num_prompts += 1
        plan = OpenPlan(str(self._number), prompt(self._number, self._num_blocks), NAMESPACE)
        length = len(plan.token_ids)
        self._timed("open", lambda: self.manager.open_sequences([plan]))
        commit = CommitPlan(plan.sequence_id, length)
        self._timed("publish", lambda: self.manager.commit_blocks([commit]))
        more = ExtendPlan(plan.sequence_id, length + 1)
        self._timed("extend", lambda: self.manager.extend_sequences([more]))
        self._timed("close", lambda: self.manager.close_sequences([plan.sequence_id]))

    def _timed(self, name: str, call: Any) -> None:
        started = time.perf_counter()
        call()
        self.seconds[name] += time.perf_counter() - started

    def forget_times(self) -> None:
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.num_prompts = 0


def measure(size: int, options: argparse.Namespace) -> dict[str, float]:
    gc.collect()
    before = psutil.Process().memory_info().rss
    num_blocks = min(options.prompt_blocks, size // 8)
    pool = Pool(size, num_blocks, options.eviction)
    for _ in tqdm(range(size // num_blocks + 1), desc=f"fill {size:,}", leave=False):
        pool.come_and_go()
    gc.collect()
    num_bytes = (psutil.Process().memory_info().rss - before) / size
    pool.forget_times()
    for _ in tqdm(range(options.prompts), desc=f"replay {size:,}", leave=False):
        pool.come_and_go()
    figures = {
        name: 1e6 * seconds / pool.num_prompts / num_blocks
        for name, seconds in pool.seconds.items()
        if name != "extend"
    }
    figures["extend"] = 1e6 * pool.seconds["extend"] / pool.num_prompts
    return figures | {"bytes": num_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sizes = [10_000, 100_000, 1_000_000, 4_000_000]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="blocks of each pool")
    parser.add_argument("--prompt-blocks", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=2000, help="measured in each full pool")
    parser.add_argument("--eviction", default="lhd")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    # A process each, or one would use memory that another has left behind.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as processes:
        report = {size: processes.submit(measure, size, options).result() for size in options.sizes}
    table = Table(title="µs per block (extend: per call); bytes per block, its tokens included")
    table.add_column("blocks", justify="right")
    for name in report[options.sizes[0]]:
        table.add_column(name, justify="right")
    for size, figures in report.items():
        table.add_row(f"{size:,}", *(f"{value:.2f}" for value in figures.values()))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
