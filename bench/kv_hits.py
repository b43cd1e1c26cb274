"""Hit ratios of the page manager on a whole trace, beside what could be had at best.

Requests come one after the other, each with nothing else running. A block of the trace
(512 tokens) is a block of the manager here, with a few tokens that stand for all of it, and
every prompt has one token more, so that its last block can be found too.
"""

from __future__ import annotations

import argparse
import heapq
import json
from array import array
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from bench import workload
from bench.kv import NAMESPACE, SHAPE, TRACE_BLOCK
from kvstore.attachment import ManagerOptions
from kvstore.fakes import FakeStorage
from kvstore.manager import PageManager
from kvstore.types import CommitPlan, OpenPlan

_SIZE = 8  # tokens of a manager's block
_WHOLE_TRACE = 1_000_000


def through_manager(prompts: list[tuple[int, ...]], num_blocks: int) -> float:
    """Share of all blocks that were found. A prompt that is over the pool is passed over."""
    manager = PageManager(
        ManagerOptions(num_blocks * _SIZE * SHAPE.token_bytes, _SIZE), FakeStorage()
    )
    manager.attach_pool(SHAPE)
    num_hits = num_total = 0
    for number, blocks in enumerate(tqdm(prompts, desc=f"{num_blocks} blocks", leave=False)):
        num_total += len(blocks)
        if len(blocks) >= num_blocks:
            continue
        tokens = array("i", (block * _SIZE + i for block in blocks for i in range(_SIZE)))
        tokens.append(0)
        plan = OpenPlan(str(number), tokens, NAMESPACE)
        [opened] = manager.open_sequences([plan])
        num_hits += opened.num_cached_tokens // _SIZE
        manager.commit_blocks([CommitPlan(plan.sequence_id, len(blocks) * _SIZE)])
        manager.close_sequences([plan.sequence_id])
    return num_hits / num_total


def belady(prompts: list[tuple[int, ...]], num_blocks: int) -> float:
    """The same if what is used again last could always be evicted first.

    Source: Belady 1966, A study of replacement algorithms for a virtual-storage computer.
    """
    order = [block for blocks in prompts for block in blocks]
    never = len(order)
    following, seen = [never] * len(order), dict[int, int]()
    for at in range(len(order) - 1, -1, -1):
        following[at] = seen.get(order[at], never)
        seen[order[at]] = at
    cached: dict[int, int] = {}  # block -> its next use
    heap: list[tuple[int, int]] = []
    num_hits = 0
    for at, block in enumerate(order):
        num_hits += block in cached
        cached[block] = following[at]
        heapq.heappush(heap, (-following[at], block))
        while len(cached) > num_blocks:
            next_use, last = heapq.heappop(heap)
            if cached.get(last) == -next_use:
                del cached[last]
    return num_hits / len(order)


def measure(prompts: list[tuple[int, ...]], capacities: list[int]) -> dict[str, Any]:
    """`capacities` in tokens of the trace."""
    num_all = len({block for blocks in prompts for block in blocks}) + max(map(len, prompts)) + 1
    rows = [
        {
            "tokens": capacity,
            "lru": through_manager(prompts, capacity // TRACE_BLOCK),
            "belady": belady(prompts, capacity // TRACE_BLOCK),
        }
        for capacity in capacities
    ]
    return {"unlimited": through_manager(prompts, num_all), "capacities": rows}


def show(report: dict[str, Any]) -> None:
    table = Table(title=f"hit ratio, unlimited {report['unlimited']:.6f}")
    for heading in ("tokens", "lru", "belady"):
        table.add_column(heading, justify="right")
    for row in report["capacities"]:
        table.add_row(f"{row['tokens']:,}", f"{row['lru']:.4f}", f"{row['belady']:.4f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="a Mooncake .jsonl[.gz]")
    parser.add_argument(
        "--capacity", type=int, nargs="+", default=[1_000_000, 3_000_000, 10_000_000]
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    prompts = [shape.block_ids for shape in workload.trace(options.trace, _WHOLE_TRACE)]
    if not prompts[0]:
        parser.error(f"{options.trace} says nothing about shared prefixes")
    report = measure(prompts, options.capacity)
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
