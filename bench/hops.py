"""What three processes cost against the same domains wired in one process.

Both sides run the same engine on the same load: `batch` sequences that decode together.
In one, its kvstore and compute are objects in this process; in the other they are
processes of their own behind gRPC on Unix sockets. Rounds alternate between the two, so
that a machine that changes its speed changes both; the figure to quote is the ratio.

    python -m bench.hops --batch 1 8 32 --rounds 5 --json out.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gateway.engine import Engine
from gateway.errors import WorkerUnavailable
from gateway.tokenizer import Tokenizer
from gateway.types import Delta, GenerationRequest
from services.common import config, model_files
from services.gateway.compute_clients import GrpcCompute
from services.gateway.kvstore_clients import GrpcKvStore
from services.local import LocalQuire

KV_MEMORY = "512MiB"
START_SECONDS = 180


async def wait_ready(engine: Engine) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not engine.is_ready():
        if time.monotonic() > deadline:
            raise WorkerUnavailable("the workers did not come up")
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def one_process(settings: config.WorkerSettings) -> AsyncIterator[Engine]:
    local = LocalQuire(settings, kv_memory_bytes=config.memory_bytes(KV_MEMORY))
    await local.start()
    try:
        await wait_ready(local.engine)
        yield local.engine
    finally:
        await local.stop()


@contextlib.asynccontextmanager
async def three_processes(settings: config.WorkerSettings) -> AsyncIterator[Engine]:
    """kvstore and compute as processes; the third is this one."""
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        kvstore, compute = f"unix:{folder}/kvstore.sock", f"unix:{folder}/compute.sock"
        shared = ["--log-level=warning"]
        children = [
            start("kvstore", [f"--listen={kvstore}", f"--kv-memory={KV_MEMORY}", *shared]),
            start(
                "compute",
                [
                    f"--listen={compute}",
                    f"--kvstore={kvstore}",
                    f"--model={settings.model}",
                    f"--dtype={settings.dtype}",
                    f"--threads={settings.threads}",
                    *shared,
                ],
            ),
        ]
        found = model_files.find(settings.model, settings.cache_dir, lambda *_: None)
        engine = Engine(GrpcKvStore(kvstore), GrpcCompute(compute), Tokenizer.load(found.directory))
        await engine.start()
        try:
            await wait_ready(engine)
            yield engine
        finally:
            await engine.stop()
            for child in reversed(children):
                child.terminate()
                child.wait(30)


def start(service: str, flags: list[str]) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    if service != "compute":
        environment["OMP_NUM_THREADS"] = "1"
    return subprocess.Popen([sys.executable, "-m", f"services.{service}", *flags], env=environment)


async def measure(engine: Engine, batch: int, num_tokens: int, round_number: int) -> float:
    """Tokens per second from the moment all sequences have their first token."""
    rng = np.random.default_rng(round_number)
    vocab_size = engine.model.vocab_size
    all_started = asyncio.Event()
    num_started = 0

    async def one(index: int) -> int:
        nonlocal num_started
        request = GenerationRequest(
            request_id=f"r{round_number}-{index}",
            prompt_ids=rng.integers(0, vocab_size, 32).tolist(),
            max_tokens=num_tokens,
            ignore_eos=True,
        )
        counted, first = 0, True
        async for event in engine.generate(request):
            if isinstance(event, Delta) and event.token_ids:
                if first:
                    first = False
                    num_started += 1
                    if num_started == batch:
                        all_started.set()
                elif all_started.is_set():
                    counted += len(event.token_ids)
        return counted

    tasks = [asyncio.create_task(one(index)) for index in range(batch)]
    await all_started.wait()
    started = time.perf_counter()
    counts = await asyncio.gather(*tasks)
    return sum(counts) / (time.perf_counter() - started)


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    settings = config.WorkerSettings(
        model=arguments.model, dtype=arguments.dtype, threads=arguments.threads
    )
    results = []
    console = Console(stderr=True)
    console.print("loading the model twice …")
    async with one_process(settings) as local, three_processes(settings) as remote:
        sides = {"one process": local, "three processes": remote}
        with Progress(console=console) as progress:
            total = len(arguments.batch) * (arguments.rounds + 1)
            bar = progress.add_task("rounds", total=total)
            for batch in arguments.batch:
                rates: dict[str, list[float]] = {name: [] for name in sides}
                for number in range(arguments.rounds + 1):  # round 0 warms up
                    for name, engine in sides.items():
                        rate = await measure(engine, batch, arguments.tokens, number)
                        if number:
                            rates[name].append(rate)
                    progress.advance(bar)
                results.append(summary(batch, rates))
    return {"model": arguments.model, "dtype": arguments.dtype, "results": results}


def summary(batch: int, rates: dict[str, list[float]]) -> dict[str, object]:
    one, three = rates["one process"], rates["three processes"]
    ratios = [b / a for a, b in zip(one, three, strict=True)]
    return {
        "batch": batch,
        "one_process_tokens_per_s": statistics.median(one),
        "three_processes_tokens_per_s": statistics.median(three),
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def show(outcome: dict[str, object]) -> None:
    table = Table(title=f"Decode, {outcome['model']}, {outcome['dtype']}: tokens/s")
    for heading in ("batch", "one process", "three processes", "ratio", "ratio min … max"):
        table.add_column(heading, justify="right")
    for row in outcome["results"]:  # type: ignore[attr-defined]
        table.add_row(
            str(row["batch"]),
            f"{row['one_process_tokens_per_s']:.1f}",
            f"{row['three_processes_tokens_per_s']:.1f}",
            f"{row['ratio_median']:.3f}",
            f"{row['ratio_min']:.3f} … {row['ratio_max']:.3f}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=config.DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64, help="tokens per sequence and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    outcome = asyncio.run(run(arguments))
    show(outcome)
    if arguments.json:
        arguments.json.write_text(json.dumps(outcome, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
