"""Prompts of recorded traces as ids of blocks: equal ids stand for equal prefixes."""

from __future__ import annotations

import gzip
import heapq
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import workload

_WHOLE_TRACE = 1_000_000
_MOONCAKE_BLOCK = 512
_AZURE_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a trace in the order of their arrival, in blocks of so many tokens."""

    kind: str
    block_tokens: int
    blocks: list[tuple[int, ...]]
    default_capacities: tuple[int, ...]  # in tokens
    shares: bool = True  # the trace knows which prefixes are equal

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.blocks))


def read(path: Path) -> Prompts:
    """The prompts of a Mooncake trace, of agents' sessions, or of an Azure trace.

    Raises:
        ValueError: it is none of these, or has no requests.
    """
    if ".csv" in path.suffixes:
        return _azure(path)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        first = json.loads(next(file, "{}"))
        if "requests" in first:
            return _agents([first, *map(json.loads, file)])
    shapes = workload.trace(path, _WHOLE_TRACE)
    capacities = (1_000_000, 3_000_000, 10_000_000)
    return Prompts("Mooncake", _MOONCAKE_BLOCK, [s.block_ids for s in shapes], capacities)


def _agents(sessions: list[dict[str, Any]]) -> Prompts:
    """Sessions that begin together. Their ids are their own: none shares with another."""
    names = itertools.count()
    queues = [_session(session, names) for session in sessions]
    prompts = [blocks for _, _, blocks in heapq.merge(*queues)]
    capacities = (250_000, 500_000, 1_000_000, 2_000_000)
    return Prompts("agent sessions", sessions[0]["block_size"], prompts, capacities)


def _session(
    session: dict[str, Any], names: Iterator[int]
) -> Iterator[tuple[float, str, tuple[int, ...]]]:
    known: dict[int, int] = {}
    for request in session["requests"]:
        blocks = []
        for block in request["hash_ids"]:
            if block not in known:
                known[block] = next(names)
            blocks.append(known[block])
        yield request["t"], session["id"], tuple(blocks)


def _azure(path: Path) -> Prompts:
    """Lengths only: every prompt is taken to be different from all others."""
    names = itertools.count()
    prompts = [
        tuple(itertools.islice(names, -(-shape.num_input // _AZURE_BLOCK)))
        for shape in workload.trace(path, _WHOLE_TRACE)
    ]
    return Prompts("Azure", _AZURE_BLOCK, prompts, (1_000_000,), shares=False)
