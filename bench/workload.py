"""What to ask of a server, and when: synthetic requests or a recorded trace.

Sources: means of ShareGPT lengths from Kwon et al. 2023, arXiv:2309.06180, section
6.1; trace formats of Mooncake (FAST '25 release) and of the Azure public dataset.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

SHAREGPT_INPUT, SHAREGPT_OUTPUT = 161.31, 337.99

# Token ids that are ordinary text in every vocabulary we know: past the special ones,
# below the smallest.
_FIRST_TOKEN, _LAST_TOKEN = 1000, 30_000

_MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """One request of a workload. `at` in seconds; equal block ids mean equal tokens."""

    at: float
    num_input: int
    num_output: int
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    at: float
    prompt_ids: list[int]
    max_tokens: int


def synthetic(
    count: int, mean_input: float, mean_output: float, cv: float, seed: int
) -> list[Shape]:
    """Lengths from log-normal distributions with the given means.

    Conversations' lengths are skewed with a long tail; `cv` is the standard deviation
    over the mean, and 0 makes all lengths equal.
    """
    draw = random.Random(f"lengths {seed}")
    return [
        Shape(0.0, _length(draw, mean_input, cv), _length(draw, mean_output, cv))
        for _ in range(count)
    ]


def _length(draw: random.Random, mean: float, cv: float) -> int:
    sigma = math.sqrt(math.log(1 + cv * cv))
    return max(1, round(draw.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))


def trace(path: Path, count: int) -> list[Shape]:
    """The first `count` requests of a Mooncake .jsonl or Azure .csv file, or .gz of one.

    Raises:
        ValueError: it is neither, or has no requests.
    """
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    readers = {".jsonl": _mooncake, ".csv": _azure}
    if suffix not in readers:
        raise ValueError(f"{path}: neither .jsonl nor .csv")
    with _opened(path) as file:
        try:
            shapes = list(itertools.islice(readers[suffix](file), count))
        except KeyError as error:
            raise ValueError(f"{path}: a row has no {error}") from None
    if not shapes:
        raise ValueError(f"{path}: no requests")
    return shapes


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        yield file


def _mooncake(file: TextIO) -> Iterator[Shape]:
    for line in file:
        row = json.loads(line)
        blocks = tuple(row["hash_ids"])
        yield Shape(row["timestamp"] / 1000, row["input_length"], row["output_length"], blocks)


def _azure(file: TextIO) -> Iterator[Shape]:
    began = None
    for row in csv.DictReader(file):
        # Python reads at most six digits of a second; the file has seven.
        moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
        began = began or moment
        at = (moment - began).total_seconds()
        yield Shape(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds of a Poisson process with `rate` arrivals per second; all 0 if infinite."""
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(f"arrivals {seed}")
    return list(itertools.accumulate(draw.expovariate(rate) for _ in range(count)))


def build(
    shapes: list[Shape], times: list[float], max_length: int, seed: int
) -> tuple[list[Request], int]:
    """Requests with tokens, and how many were cut to fit `max_length` tokens.

    A prompt keeps its beginning, where shared prefixes are; at least a quarter of
    the length, or the whole answer if that is less, is left for the answer.
    """
    requests, num_cut = [], 0
    for index, (shape, at) in enumerate(zip(shapes, times, strict=True)):
        num_output = max(1, min(shape.num_output, max_length // 4))
        num_input = max(1, min(shape.num_input, max_length - num_output))
        num_output = max(1, min(shape.num_output, max_length - num_input))
        num_cut += (num_input, num_output) != (shape.num_input, shape.num_output)
        tokens = _tokens(shape, num_input, f"{seed} {index}")
        requests.append(Request(at, tokens, num_output))
    return requests, num_cut


def _tokens(shape: Shape, count: int, seed: str) -> list[int]:
    if not shape.block_ids:
        return _random_tokens(seed, count)
    blocks = (_random_tokens(f"block {block}", _MOONCAKE_BLOCK) for block in shape.block_ids)
    return list(itertools.islice(itertools.chain.from_iterable(blocks), count))


def _random_tokens(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(_FIRST_TOKEN, _LAST_TOKEN), k=count)
