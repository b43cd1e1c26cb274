"""What sequences of one request share, and what a long prompt does to those that decode.

Sharing: the most blocks that are held at once for n samples or beams of a prompt, beside
four times those of a request for one. Stall: the gaps between the tokens of a request that
decodes while a long prompt enters: with the step's target, without it, and in one chunk.

    python -m bench.groups --json groups.json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from gateway.engine import EngineSettings
from gateway.limits import Limits
from gateway.ports import SamplingOptions
from gateway.types import BeamOptions, Delta, GenerationRequest
from services.common import config
from services.local import LocalQuire

_BLOCK_SIZE = 16
_NUM_TOKENS = 64
_PROMPTS = (64, 512, 2048)
_WAYS = {
    "target of 0.25 s": Limits(step_target=0.25),
    "budget of 512 alone": Limits(step_target=0.0),
    "one chunk": Limits(step_target=0.0, token_budget=4608),
}
_numbers = itertools.count()


def main() -> None:
    arguments = _arguments()
    sharing = asyncio.run(_sharing(arguments))
    _print(sharing, "most blocks held at once")
    stalls = asyncio.run(_stalls(arguments))
    _print(stalls, f"gaps between tokens while {arguments.prompt} tokens enter, seconds")
    if arguments.json:
        machine = {"cores": len(os.sched_getaffinity(0)), "model": arguments.model}
        report = {"machine": machine, "sharing": sharing, "stalls": stalls}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=config.DEFAULT_MODEL)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt that enters")
    parser.add_argument("--repeat", type=int, default=3, help="prompts that enter, one by one")
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args()


def _print(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)


async def _started(arguments: argparse.Namespace, limits: Limits) -> LocalQuire:
    settings = config.load(config.WorkerSettings, "bench", ["--model", arguments.model])
    quire = LocalQuire(
        settings,
        kv_memory_bytes=2**30,
        block_size=_BLOCK_SIZE,
        engine_settings=EngineSettings(limits, step_timeout=300.0),
    )
    await quire.start()
    while not quire.engine.is_ready():  # noqa: ASYNC110 - it has no event for this
        await asyncio.sleep(0.01)
    return quire


def _request(num_prompt: int, num_tokens: int, **options: Any) -> GenerationRequest:
    """A prompt that no other one begins like."""
    number = next(_numbers)
    rng = np.random.default_rng(number)
    prompt = rng.integers(100, 40_000, num_prompt).tolist()
    sampling = SamplingOptions() if "beams" in options else SamplingOptions(temperature=1.0, seed=1)
    return GenerationRequest(f"r{number}", prompt, num_tokens, sampling, ignore_eos=True, **options)


async def _run(quire: LocalQuire, request: GenerationRequest) -> list[float]:
    """When each delta came."""
    return [
        time.perf_counter()
        async for event in quire.engine.generate(request)
        if isinstance(event, Delta) and event.token_ids
    ]


async def _sharing(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    quire = await _started(arguments, Limits())
    rows = []
    for num_prompt in tqdm(_PROMPTS, "sharing"):
        apart = 4 * await _most_held(quire, _request(num_prompt, _NUM_TOKENS))
        samples = await _most_held(quire, _request(num_prompt, _NUM_TOKENS, n=4))
        options = {"n": 4, "beams": BeamOptions(4)}
        beams = await _most_held(quire, _request(num_prompt, _NUM_TOKENS, **options))
        rows.append(
            {
                "prompt": num_prompt,
                "4 x 1": apart,
                "n = 4": samples,
                "4 beams": beams,
                "n = 4, share": samples / apart,
                "4 beams, share": beams / apart,
            }
        )
    await quire.stop()
    return rows


async def _most_held(quire: LocalQuire, request: GenerationRequest) -> int:
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, quire.manager.stats().num_held)
            await asyncio.sleep(0.001)

    watching = asyncio.create_task(watch())
    await _run(quire, request)
    watching.cancel()
    return most


async def _stalls(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, limits in tqdm(_WAYS.items(), "stalls"):
        quire = await _started(arguments, limits)
        await _run(quire, _request(512, 2))  # so that the pace of prefills is known
        decoding = asyncio.create_task(_run(quire, _request(32, 4096)))
        await asyncio.sleep(1.0)
        entered = []
        for _ in range(arguments.repeat):
            started = time.perf_counter()
            await _run(quire, _request(arguments.prompt, 1))
            entered.append((started, time.perf_counter()))
            await asyncio.sleep(0.5)
        quire.engine.cancel(f"r{next(_numbers) - arguments.repeat - 1}")
        times = np.array(await decoding)
        gaps = np.diff(times)
        amid = np.zeros(len(gaps), bool)
        for start, end in entered:
            amid |= (times[1:] > start) & (times[:-1] < end)
        rows.append(
            {
                "": name,
                "alone, median": float(np.median(gaps[~amid])),
                "amid, median": float(np.median(gaps[amid])),
                "amid, p99": float(np.quantile(gaps[amid], 0.99)),
                "amid, most": float(gaps[amid].max()),
                "prompt's TTFT": float(np.median([end - start for start, end in entered])),
            }
        )
        await quire.stop()
    return rows


if __name__ == "__main__":
    main()
