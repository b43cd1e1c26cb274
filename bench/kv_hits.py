"""Hit ratios of the page manager's eviction policies, beside what could be had at best.

Requests come one after the other, each with nothing else running. A block of the trace is a
block of the manager here (or more, with --expand), with a few tokens that stand for all of it,
and every prompt has one token more, so that its last block can be found too.

    python -m bench.kv_hits --trace mooncake_conversation.jsonl.gz --plot hits.png
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench import kv_prompts, kv_report
from bench.kv import NAMESPACE, SHAPE
from kvstore.attachment import ManagerOptions
from kvstore.eviction import DEFAULT_POLICY, POLICIES
from kvstore.fakes import FakeStorage
from kvstore.manager import PageManager
from kvstore.types import CommitPlan, OpenPlan

_SIZE = 8  # tokens of a manager's block


def through_manager(
    prompts: list[tuple[int, ...]],
    num_blocks: int,
    eviction: str = DEFAULT_POLICY,
    expand: int = 1,
) -> tuple[float, float]:
    """Share of all blocks that were found, and seconds in the manager per block of a prompt.

    Each block of the trace is `expand` blocks of the manager, which has room for `num_blocks`
    of the trace. A prompt that is over the pool is passed over.
    """
    size = _SIZE * expand
    options = ManagerOptions(num_blocks * size * SHAPE.token_bytes, _SIZE, eviction=eviction)
    manager = PageManager(options, FakeStorage())
    manager.attach_pool(SHAPE)
    num_hits = num_total = 0
    seconds = 0.0
    title = f"{eviction}, {num_blocks} blocks"
    for number, blocks in enumerate(tqdm(prompts, desc=title, leave=False)):
        num_total += len(blocks)
        if len(blocks) >= num_blocks:
            continue
        plan = OpenPlan(str(number), _tokens(blocks, size), NAMESPACE)
        started = time.perf_counter()
        [opened] = manager.open_sequences([plan])
        manager.commit_blocks([CommitPlan(plan.sequence_id, len(blocks) * size)])
        manager.close_sequences([plan.sequence_id])
        seconds += time.perf_counter() - started
        num_hits += opened.num_cached_tokens
    return num_hits / size / num_total, seconds / num_total / expand


def _tokens(blocks: tuple[int, ...], size: int) -> array[int]:
    ids = np.array(blocks, np.int64)[:, None] * size
    tokens = array("i", (ids + np.arange(size)).astype(np.int32).tobytes())
    tokens.append(0)
    return tokens


def belady(prompts: list[tuple[int, ...]], num_blocks: int) -> float:
    """The same if what is used again last could always be evicted first.

    The blocks of a prompt are held until its end, as the manager must.
    Source: Belady 1966, A study of replacement algorithms for a virtual-storage computer.
    """
    order = [block for blocks in prompts for block in blocks]
    never = len(order)
    following, seen = [never] * never, dict[int, int]()
    for at in range(never - 1, -1, -1):
        following[at] = seen.get(order[at], never)
        seen[order[at]] = at
    cached: dict[int, int] = {}  # block -> its next use
    heap: list[tuple[int, int]] = []
    num_hits = at = 0
    for blocks in prompts:
        held = dict(zip(blocks, following[at : at + len(blocks)], strict=True))
        at += len(blocks)
        if len(blocks) >= num_blocks:
            continue
        num_hits += sum(block in cached for block in blocks)
        cached |= held
        while len(cached) > num_blocks:
            next_use, last = heapq.heappop(heap)
            if last not in held and cached.get(last) == -next_use:
                del cached[last]
        for block, next_use in held.items():
            heapq.heappush(heap, (-next_use, block))
    return num_hits / never


def unlimited(prompts: list[tuple[int, ...]]) -> float:
    """The same if nothing had to be evicted."""
    num_all = len({block for blocks in prompts for block in blocks})
    return through_manager(prompts, num_all + max(map(len, prompts)) + 1)[0]


def measure(
    prompts: kv_prompts.Prompts, capacities: list[int], policies: list[str], expand: int
) -> dict[str, Any]:
    """`capacities` in tokens of the trace."""
    rows = []
    for capacity in capacities:
        num_blocks = capacity // prompts.block_tokens
        row: dict[str, Any] = {"tokens": capacity, "hit_ratio": {}, "microseconds_per_block": {}}
        for policy in policies:
            ratio, seconds = through_manager(prompts.blocks, num_blocks, policy, expand)
            row["hit_ratio"][policy] = ratio
            row["microseconds_per_block"][policy] = 1e6 * seconds
        row["hit_ratio"]["belady"] = belady(prompts.blocks, num_blocks)
        rows.append(row)
    return {
        "trace": prompts.kind,
        "prompts": len(prompts.blocks),
        "blocks": prompts.num_blocks,
        "block_tokens": prompts.block_tokens,
        "blocks_per_trace_block": expand,
        "unlimited": unlimited(prompts.blocks),
        "capacities": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake, agents or Azure")
    parser.add_argument("--capacity", type=int, nargs="+", help="tokens, e.g. 1000000 3000000")
    parser.add_argument(
        "--policy", nargs="+", choices=list(POLICIES), default=list(POLICIES), help="default: all"
    )
    parser.add_argument(
        "--expand", type=int, default=1, help="blocks of the manager for each one of the trace"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw hit ratio over capacity into this file")
    options = parser.parse_args()
    prompts = kv_prompts.read(options.trace)
    if not prompts.shares:
        print(f"{options.trace} does not say which prefixes are equal: this tells the cost only")
    capacities = options.capacity or list(prompts.default_capacities)
    report = measure(prompts, sorted(capacities), options.policy, options.expand)
    kv_report.show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        kv_report.plot(report, options.plot)


if __name__ == "__main__":
    main()
