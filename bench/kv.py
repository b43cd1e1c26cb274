"""What the page manager itself costs, on a recorded trace and without any model.

Replays a Mooncake trace through kvstore.manager: open a prompt, commit it, extend it token
by token with all others that run, commit full blocks, close. Each 512-token id of the
trace stands for 512 tokens of its own.

    python -m bench.kv --trace mooncake_conversation.jsonl.gz
"""

from __future__ import annotations

import argparse
import json
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from bench import workload
from kvstore.attachment import ManagerOptions
from kvstore.errors import OutOfBlocks
from kvstore.eviction import DEFAULT_POLICY, POLICIES
from kvstore.manager import PageManager
from kvstore.posix_pool import PosixStorage
from kvstore.types import CommitPlan, ExtendPlan, KvShape, Namespace, OpenPlan

SHAPE = KvShape(num_layers=1, num_kv_heads=1, head_size=8, dtype="bfloat16")
NAMESPACE = Namespace(b"bench")
TRACE_BLOCK = 512
_ANSWER_TOKEN = 2**31 - 1  # in no prompt
_WHOLE_TRACE = 1_000_000


@dataclass(slots=True)
class _Running:
    """A sequence: its tokens, and how many of its answer there are and will be."""

    length: int
    num_output: int
    num_generated: int = 0


class Replay:
    """One run of a trace, timing each operation of the manager."""

    def __init__(self, shapes: list[workload.Shape], options: argparse.Namespace) -> None:
        self._shapes, self._options = shapes, options
        size = options.num_blocks * options.block_size * SHAPE.token_bytes
        self.manager = PageManager(
            ManagerOptions(size, options.block_size, eviction=options.eviction), PosixStorage()
        )
        self.manager.attach_pool(SHAPE)
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self._running: dict[str, _Running] = {}

    def run(self) -> None:
        """Replay everything; one request at a time enters while there is room."""
        waiting = iter(tqdm(list(enumerate(self._shapes)), desc="requests", leave=False))
        following = next(waiting, None)
        while following or self._running:
            while following and len(self._running) < self._options.running:
                if not self._open(str(following[0]), following[1]):
                    break
                following = next(waiting, None)
            self._step()

    def _open(self, sequence_id: str, shape: workload.Shape) -> bool:
        prompt = tokens_of(shape)
        plan = OpenPlan(sequence_id, prompt, NAMESPACE)
        num_blocks = -(-len(prompt) // self._options.block_size)
        try:
            self._timed("open", num_blocks, lambda: self.manager.open_sequences([plan]))
        except OutOfBlocks:
            return False
        commit = CommitPlan(sequence_id, len(prompt))
        self._timed("publish", num_blocks, lambda: self.manager.commit_blocks([commit]))
        num_output = max(1, min(shape.num_output, self._options.most_output))
        self._running[sequence_id] = _Running(len(prompt), num_output)
        return True

    def _step(self) -> None:
        """One token for each running sequence."""
        size = self._options.block_size
        plans = [ExtendPlan(key, one.length + 1) for key, one in self._running.items()]
        self._timed("extend", len(plans), lambda: self.manager.extend_sequences(plans))
        commits = []
        for key, one in self._running.items():
            one.length += 1
            one.num_generated += 1
            if one.length % size == 0:
                new = [_ANSWER_TOKEN] * min(size, one.num_generated)
                commits.append(CommitPlan(key, one.length, one.length - len(new), new))
        if commits:
            self._timed("commit", len(commits), lambda: self.manager.commit_blocks(commits))
        ended = [k for k, one in self._running.items() if one.num_generated >= one.num_output]
        if ended:
            self._timed("close", len(ended), lambda: self.manager.close_sequences(ended))
        for key in ended:
            del self._running[key]

    def _timed(self, name: str, count: int, call: Callable[[], object]) -> None:
        started = time.perf_counter()
        call()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        self.counts[name] = self.counts.get(name, 0) + count

    def report(self) -> dict[str, Any]:
        """The figures: whole, and per operation."""
        stats = self.manager.stats()
        whole = sum(self.seconds.values())
        return {
            "requests": len(self._shapes),
            "requests_per_s": len(self._shapes) / whole,
            "hit_ratio": stats.num_hit_tokens / stats.num_prompt_tokens,
            "evictions": stats.num_evictions,
            "microseconds": {
                name: 1e6 * seconds / self.counts[name] for name, seconds in self.seconds.items()
            },
        }


def tokens_of(shape: workload.Shape) -> array[int]:
    """The prompt: equal ids of the trace give equal tokens, others differ in every one."""
    ids = np.array(shape.block_ids, np.int64)[:, None] * TRACE_BLOCK
    tokens = (ids + np.arange(TRACE_BLOCK)).reshape(-1)[: shape.num_input]
    return array("i", tokens.astype(np.int32).tobytes())


_UNITS = {
    "open": "prompt block (match, evict, allocate)",
    "publish": "prompt block",
    "extend": "sequence and step",
    "commit": "block of an answer",
    "close": "sequence",
}


def show(report: dict[str, Any]) -> None:
    table = Table(
        title=f"{report['requests_per_s']:.0f} requests/s, hit ratio {report['hit_ratio']:.4f}"
    )
    table.add_column("operation")
    table.add_column("µs", justify="right")
    table.add_column("per")
    for name, cost in report["microseconds"].items():
        table.add_row(name, f"{cost:.2f}", _UNITS[name])
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="a Mooncake .jsonl[.gz]")
    parser.add_argument("--num-requests", type=int, default=2000)
    parser.add_argument("--most-input", type=int, default=16_384, help="skip longer prompts")
    parser.add_argument("--most-output", type=int, default=64, help="cut longer answers")
    parser.add_argument("--running", type=int, default=64, help="sequences at a time")
    parser.add_argument("--num-blocks", type=int, default=65_536)
    parser.add_argument("--block-size", type=int, default=16, choices=[8, 16, 32])
    parser.add_argument("--eviction", default=DEFAULT_POLICY, choices=list(POLICIES))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    whole = workload.trace(options.trace, _WHOLE_TRACE)
    if not whole[0].block_ids:
        parser.error(f"{options.trace} says nothing about shared prefixes")
    shapes = [shape for shape in whole if shape.num_input <= options.most_input]
    replay = Replay(shapes[: options.num_requests], options)
    replay.run()
    report = replay.report()
    replay.manager.close()
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
