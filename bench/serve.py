"""Drives the REST interface of a running Quire and reports what its clients see.

    python -m bench.serve --rate 2 --num-requests 200
    python -m bench.serve --concurrency 8 --input 128 --output 64 --cv 0
    python -m bench.serve --trace mooncake_conversation.jsonl.gz --json -

TTFT: from sending a request to the first text. ITL: between two chunks of text, which
hold one token each unless the server or the network joined some. TPOT: (end - first
text) / (tokens - 1), per request. All times in seconds, as JSON; the table has ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from bench import workload
from bench.workload import Request

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Outcome:
    """What one request came to. `error` is empty if it finished."""

    sent: float
    text_times: list[float] = field(default_factory=list)
    end: float = 0.0
    num_input: int = 0
    num_cached: int = 0
    num_output: int = 0
    error: str = ""


class Server:
    """A running Quire."""

    def __init__(self, url: str, model: str, temperature: float) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            timeout=httpx.Timeout(None, connect=10.0),
            limits=limits,
            trust_env=False,
        )
        self.model = model
        self._temperature = temperature

    async def describe(self) -> int:
        """The model's length in tokens; takes the first model if none was named."""
        response = await self._http.get("/v1/models")
        models = {m["id"]: m for m in response.raise_for_status().json()["data"]}
        self.model = self.model or next(iter(models))
        if self.model not in models:
            raise ValueError(f"model {self.model!r} is not served, but {', '.join(models)}")
        return int(models[self.model]["max_model_len"])

    async def run(self, request: Request) -> Outcome:
        """Send a request and read its stream to the end."""
        body = {
            "model": self.model,
            "prompt": request.prompt_ids,
            "max_tokens": request.max_tokens,
            "temperature": self._temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        outcome = Outcome(time.perf_counter())
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.is_error:
                    outcome.error = _refusal(response.status_code, await response.aread())
                else:
                    outcome.error = "the stream broke off"
                    async for line in response.aiter_lines():
                        _read_line(line, outcome)
        except httpx.HTTPError as error:
            outcome.error = type(error).__name__
        outcome.end = time.perf_counter()
        return outcome

    async def close(self) -> None:
        await self._http.aclose()


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"{status} {json.loads(body)['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return str(status)


def _read_line(line: str, outcome: Outcome) -> None:
    if not line.startswith("data: "):
        return
    if line == "data: [DONE]":
        outcome.error = ""
        return
    chunk = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        outcome.error = f"stream {chunk['error']['code']}"
    elif chunk["choices"]:
        if chunk["choices"][0]["text"]:
            outcome.text_times.append(time.perf_counter())
    else:
        usage = chunk["usage"]
        outcome.num_input = usage["prompt_tokens"]
        outcome.num_output = usage["completion_tokens"]
        outcome.num_cached = usage["prompt_tokens_details"]["cached_tokens"]


Run = Callable[[Request], Coroutine[Any, Any, None]]


async def open_loop(requests: list[Request], run: Run) -> None:
    """Each request at its time, no matter how the others fare."""
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for request in requests:
            await asyncio.sleep(began + request.at - time.perf_counter())
            group.create_task(run(request))


async def closed_loop(requests: list[Request], run: Run, concurrency: int) -> None:
    """`concurrency` clients, each with one request at a time."""
    waiting = iter(requests)

    async def client() -> None:
        for request in waiting:
            await run(request)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(client())


async def measure(
    server: Server, requests: list[Request], concurrency: int, max_seconds: float
) -> tuple[list[Outcome], float]:
    """Outcomes and the seconds from the first request to the last end."""
    outcomes: list[Outcome] = []
    bar = tqdm(total=len(requests), desc="requests", unit="req", file=sys.stderr)

    async def run(request: Request) -> None:
        outcome = Outcome(time.perf_counter(), error="cut off by --max-seconds")
        try:
            outcome = await server.run(request)
        finally:
            outcomes.append(outcome)
            bar.update()

    began = time.perf_counter()
    loop = closed_loop(requests, run, concurrency) if concurrency else open_loop(requests, run)
    try:
        await asyncio.wait_for(loop, max_seconds)
    except TimeoutError:
        bar.write(f"stopped after {max_seconds:g} s", file=sys.stderr)
    bar.close()
    return outcomes, time.perf_counter() - began


def summary(outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    done = [outcome for outcome in outcomes if not outcome.error]
    first = [o.text_times[0] - o.sent for o in done if o.text_times]
    between = [gap for o in done for gap in np.diff(o.text_times).tolist()]
    per_token = [
        (o.end - o.text_times[0]) / (o.num_output - 1)
        for o in done
        if o.text_times and o.num_output > 1
    ]
    num_input, num_output = sum(o.num_input for o in done), sum(o.num_output for o in done)
    return {
        "seconds": seconds,
        "num_requests": len(outcomes),
        "num_finished": len(done),
        "errors": dict(Counter(o.error for o in outcomes if o.error)),
        "input_tokens": num_input,
        "cached_input_tokens": sum(o.num_cached for o in done),
        "output_tokens": num_output,
        "requests_per_second": len(done) / seconds,
        "input_tokens_per_second": num_input / seconds,
        "output_tokens_per_second": num_output / seconds,
        "ttft": _spread(first),
        "itl": _spread(between),
        "tpot": _spread(per_token),
        "e2e": _spread([o.end - o.sent for o in done]),
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles; None if there are no values."""
    if not values:
        return None
    points = np.percentile(values, PERCENTILES)
    named = {f"p{p}": float(point) for p, point in zip(PERCENTILES, points, strict=True)}
    return {"mean": float(np.mean(values)), **named}


def show(result: dict[str, Any], console: Console) -> None:
    rates = Table(title=f"{result['num_finished']} of {result['num_requests']} requests finished")
    for name in ("requests", "input tokens", "output tokens"):
        rates.add_column(f"{name} / s", justify="right")
    rates.add_column("cached input", justify="right")
    rates.add_column("seconds", justify="right")
    cached = result["cached_input_tokens"] / max(1, result["input_tokens"])
    keys = ("requests_per_second", "input_tokens_per_second", "output_tokens_per_second")
    rates.add_row(*(f"{result[k]:.2f}" for k in keys), f"{cached:.1%}", f"{result['seconds']:.1f}")
    console.print(rates)
    times = Table("ms", *(f"{p}" for p in ("mean", *(f"p{p}" for p in PERCENTILES))))
    for column in times.columns[1:]:
        column.justify = "right"
    for key in ("ttft", "itl", "tpot", "e2e"):
        spread = result[key] or {}
        cells = [f"{value * 1000:.1f}" for value in spread.values()]
        times.add_row(key.upper(), *cells)
    console.print(times)
    for error, count in result["errors"].items():
        console.print(f"{count} x {error}", style="red")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000")
    add("--model", default="", help="default: the first one served")
    add("--num-requests", type=_positive, default=100)
    add(
        "--rate",
        type=_rate,
        help="arrivals per second (Poisson); inf: all at once; "
        "default: 1, or the trace's own times",
    )
    add("--concurrency", type=int, default=0, help="clients in a closed loop instead of a rate")
    add("--input", type=float, default=workload.SHAREGPT_INPUT, help="mean prompt tokens")
    add("--output", type=float, default=workload.SHAREGPT_OUTPUT, help="mean answer tokens")
    add("--cv", type=float, default=1.0, help="spread of the lengths; 0: all equal")
    add("--trace", type=Path, help="Mooncake .jsonl[.gz] or Azure .csv[.gz] instead")
    add(
        "--max-length",
        type=_positive,
        help="cut requests to this many tokens; default: the model's length",
    )
    add("--max-seconds", type=float, default=600.0, help="stop then, finished or not")
    add("--warmup", type=int, default=4, help="requests before the measurement")
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--json", metavar="PATH", help="write the result there; -: standard output")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def plan(options: argparse.Namespace, max_length: int) -> tuple[list[Request], int]:
    if options.trace:
        shapes = workload.trace(options.trace, options.num_requests)
    else:
        shapes = workload.synthetic(
            options.num_requests, options.input, options.output, options.cv, options.seed
        )
    if options.trace and options.rate is None:
        times = [shape.at - shapes[0].at for shape in shapes]
    else:
        rate = 1.0 if options.rate is None else options.rate
        times = workload.arrivals(len(shapes), rate, options.seed)
    return workload.build(shapes, times, max_length, options.seed)


async def bench(options: argparse.Namespace) -> dict[str, Any]:
    server = Server(options.url, options.model, options.temperature)
    try:
        length = await server.describe()
        requests, num_cut = plan(options, min(length, options.max_length or length))
        warmup, _ = workload.build(
            workload.synthetic(options.warmup, 64, 16, 0.0, options.seed),
            [0.0] * options.warmup,
            length,
            seed=-1 - options.seed,
        )
        await asyncio.gather(*map(server.run, warmup))
        outcomes, seconds = await measure(
            server, requests, options.concurrency, options.max_seconds
        )
    finally:
        await server.close()
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    del settings["json"]  # where to, not what
    settings["rate"] = "inf" if settings["rate"] == math.inf else settings["rate"]
    result = {"model": server.model, "settings": settings, "num_cut_to_length": num_cut}
    return result | summary(outcomes, seconds)


def main() -> int:
    options = _parser().parse_args()
    try:
        result = asyncio.run(bench(options))
    except (httpx.HTTPError, ValueError, OSError) as error:
        print(f"bench/serve.py: {options.url}: {error}", file=sys.stderr)
        return 1
    show(result, Console(stderr=options.json == "-"))
    text = json.dumps(result, indent=2)
    if options.json == "-":
        print(text)
    elif options.json:
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    return 0 if result["num_finished"] else 1


if __name__ == "__main__":
    sys.exit(main())
