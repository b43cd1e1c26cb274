"""What the pool's events cost: on the hot path, for keys, and for a snapshot.

python -m bench.events
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvstore.block_pool import BlockPool
from kvstore.content_keys import chained_keys
from kvstore.events import EventLog
from kvstore.frame_records import FrameRecords
from kvstore.prefix_tree import Chain
from kvstore.types import Namespace

NAMESPACE = Namespace(b"bench" * 6)
_REPEATS = 7


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def fill(num_blocks: int, block_size: int, run: int) -> BlockPool:
    """A pool full of runs of `run` blocks each, all of them findable."""
    pool = BlockPool(FrameRecords(num_blocks, block_size))
    tenant = pool.tenants.get("")
    for first in range(0, num_blocks, run):
        blocks = pool.allocate(run, tenant)
        tokens = array("i", range(first * block_size, (first + run) * block_size)).tobytes()
        pool.register(Chain(NAMESPACE), blocks, tokens)
    return pool


def drain(log: EventLog) -> None:
    while log.advance():
        pass


def long_turn(log: EventLog) -> float:
    """What 99 of 100 calls of `advance` stay below until there is nothing to do, in seconds."""
    turns = []
    has_more = True
    while has_more:
        started = time.perf_counter()
        has_more = log.advance()
        turns.append(time.perf_counter() - started)
    return statistics.quantiles(turns, n=100)[-1]


def hot_path(block_size: int, run: int, watched: bool) -> float:
    """Nanoseconds per block of `stored`, for runs of `run` blocks."""
    num_calls = 8192 // run
    pool = BlockPool(FrameRecords(run, block_size))
    chain = Chain(NAMESPACE)
    blocks = pool.allocate(run, pool.tenant(chain))
    tokens = array("i", range(run * block_size)).tobytes()
    pool.register(chain, blocks, tokens)
    log = pool.events
    if watched:
        log.start()
        drain(log)

    def tell() -> None:
        for _ in range(num_calls):
            log.stored(chain, blocks, tokens)

    spent = seconds(tell)
    drain(log)
    return 1e9 * spent / (num_calls * run)


def keys(block_size: int) -> float:
    """Microseconds per block of the digests alone."""
    data = bytes(4096 * block_size * 4)
    return 1e6 * seconds(lambda: chained_keys(bytes(32), data, 4 * block_size)) / 4096


def watch(num_blocks: int, block_size: int, run: int) -> dict[str, float]:
    """Milliseconds of a first watcher's steps in a full pool."""
    log = fill(num_blocks, block_size, run).events
    return {
        "start": 1e3 * seconds(log.start),
        "a turn of computing keys (99 %)": 1e3 * long_turn(log),
        "snapshot": 1e3 * seconds(log.snapshot),
    }


def measure(options: argparse.Namespace) -> dict[str, float]:
    """The median of several repeats of everything."""
    size, figures = options.block_size, {}

    def median(call: Callable[[], float]) -> float:
        return statistics.median(call() for _ in range(_REPEATS))

    for run in (1, 64):
        for watched in (False, True):
            name = f"stored, runs of {run}, {'watched' if watched else 'off'}: ns per block"
            figures[name] = median(lambda run=run, watched=watched: hot_path(size, run, watched))
    figures["keys: µs per block"] = median(lambda: keys(size))
    for run in (1, 16):
        steps = [watch(options.num_blocks, size, run) for _ in range(_REPEATS)]
        for step in steps[0]:
            name = f"{step}, nodes of {run}: ms for {options.num_blocks} blocks"
            figures[name] = statistics.median(one[step] for one in steps)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-blocks", type=int, default=65_536)
    parser.add_argument("--block-size", type=int, default=16, choices=[8, 16, 32])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures = measure(options)
    table = Table("figure", "")
    for name, value in figures.items():
        table.add_row(name, f"{value:.3g}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
