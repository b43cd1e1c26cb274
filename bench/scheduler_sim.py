"""The scheduler on a recorded trace, without a model: thousands of steps a second.

The scheduler and the page manager are the real ones; only the arithmetic is made up: a
step takes so much by itself, for each sequence that decodes and for each token of a
prompt. Time is the simulation's own. What happened over time is drawn with --plot.

    python -m bench.scheduler_sim --trace mooncake_conversation.jsonl.gz --plot sim.png
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from bench import workload
from bench.kv import SHAPE, tokens_of
from bench.scheduler_plot import draw
from gateway.decoding import Emission
from gateway.limits import Limits
from gateway.ports import Candidates, ModelInfo, PoolInfo, SampledToken, Step, StepResult
from gateway.scheduler import Scheduler
from gateway.types import GenerationRequest
from kvstore.attachment import ManagerOptions
from kvstore.fakes import FakeStorage
from kvstore.manager import PageManager
from services.gateway.kvstore_clients import LocalKvStore

_MOST_IDLE_TURNS = 10_000  # of a step or an update; prompts of 100,000 tokens take some 50
_ANSWER_TOKEN = 2**31 - 1  # in no prompt


@dataclass(slots=True)
class _Seen:
    """One request, as its client would see it. Seconds."""

    arrival: float
    latest: float = 0.0
    first: float = -1.0
    gaps: list[float] = field(default_factory=list)
    end: float = -1.0


@dataclass(slots=True)
class Samples:
    """Curves over time."""

    at: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    held_blocks: list[int] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)


class Simulation:
    """One trace through the scheduler, to its end."""

    def __init__(self, shapes: list[workload.Shape], options: argparse.Namespace) -> None:
        self._options = options
        size = options.block_size * SHAPE.token_bytes
        self.manager = PageManager(
            ManagerOptions(
                options.num_blocks * size, options.block_size, options.host_blocks * size
            ),
            FakeStorage(),
        )
        self.manager.attach_pool(SHAPE)
        self._kv = LocalKvStore(self.manager)
        self.now = 0.0
        limits = Limits(
            token_budget=options.token_budget,
            max_running=options.max_running,
            max_waiting=len(shapes),
            step_target=options.step_target,
        )
        self.scheduler = Scheduler(limits, (), "sim", lambda: self.now)
        pool = PoolInfo(options.block_size, options.num_blocks, 1)
        self._most_tokens = options.num_blocks * options.block_size
        self.scheduler.attach(ModelInfo("m", b"sim", 2**31 - 1, self._most_tokens, pool))
        self._arrivals = deque(enumerate(sorted(shapes, key=lambda shape: shape.at)))
        self.num_requests = len(shapes)
        self.seen: dict[str, _Seen] = {}
        self.samples = Samples()
        self.num_steps = self.num_step_tokens = 0
        self.scheduler_seconds = self.kvstore_seconds = 0.0
        self.num_failed = 0

    async def run(self) -> None:
        """Until every request has ended. Raises RuntimeError if they do not."""
        idle_turns = 0
        await self._kv.become_driver("sim")
        scheduler = self.scheduler
        with tqdm(total=self.num_requests, desc="requests", leave=False) as bar:
            while self._arrivals or scheduler.num_running or scheduler.num_waiting:
                self._arrive()
                idle_turns += 1
                if idle_turns > _MOST_IDLE_TURNS:
                    raise RuntimeError(f"nobody got a token in {_MOST_IDLE_TURNS} turns")
                began = time.perf_counter()
                step = scheduler.plan_step()
                update = scheduler.plan_update()
                self.scheduler_seconds += time.perf_counter() - began
                self.num_failed += len(scheduler.take_failures())
                result = self._compute(step) if step is not None else None
                if update:
                    began = time.perf_counter()
                    changes = await self._kv.update_sequences(update)
                    self.kvstore_seconds += time.perf_counter() - began
                    began = time.perf_counter()
                    scheduler.apply_update(changes)
                    self.scheduler_seconds += time.perf_counter() - began
                if result is not None:
                    began = time.perf_counter()
                    emissions = scheduler.apply_result(result)
                    self.scheduler_seconds += time.perf_counter() - began
                    self._note(emissions, bar)
                    idle_turns = 0 if emissions else idle_turns
                elif not update and self._arrivals:
                    self.now = max(self.now, self._arrivals[0][1].at)

    def _arrive(self) -> None:
        """What has come until now joins the queue."""
        while self._arrivals and self._arrivals[0][1].at <= self.now:
            number, shape = self._arrivals.popleft()
            prompt = self._prompt(number, shape)
            num_output = max(1, shape.num_output)
            request = GenerationRequest(f"r{number}", prompt, num_output)
            self.scheduler.add(request, len(prompt) + num_output)
            self.seen[request.request_id] = _Seen(shape.at)

    def _prompt(self, number: int, shape: workload.Shape) -> list[int]:
        most = self._most_tokens - max(1, shape.num_output)
        if shape.block_ids:
            return tokens_of(shape).tolist()[:most]
        # No two requests of such a trace share anything.
        return [number % (2**20)] * max(1, min(shape.num_input, most))

    def _compute(self, step: Step) -> StepResult:
        options = self._options
        num_decodes = sum(1 for chunk in step.chunks if chunk.num_tokens == 1)
        num_prompt = sum(chunk.num_tokens for chunk in step.chunks) - num_decodes
        seconds = 1e-3 * (
            options.step_ms + options.decode_ms * num_decodes + options.prompt_ms * num_prompt
        )
        self.now += seconds
        self.num_steps += 1
        self.num_step_tokens += num_decodes + num_prompt
        self._sample(num_prompt)
        tokens = [SampledToken(c.sequence_id, _ANSWER_TOKEN) for c in step.chunks if c.sample]
        no_candidates: list[Candidates] = []
        return StepResult(step.step_id, tokens, seconds, 0.0, no_candidates)

    def _sample(self, num_prompt: int) -> None:
        scheduler, samples = self.scheduler, self.samples
        samples.at.append(self.now)
        samples.waiting.append(scheduler.num_waiting)
        samples.running.append(scheduler.num_running)
        samples.prompt_tokens.append(num_prompt)
        samples.held_blocks.append(self.manager.stats().num_held)
        samples.preemptions.append(scheduler.preemption_stats().num_groups)

    def _note(self, emissions: list[Emission], bar: tqdm[Any]) -> None:
        for emission in emissions:
            seen = self.seen[emission.group.request.request_id]
            if seen.first < 0:
                seen.first = self.now
            else:
                seen.gaps.append(self.now - seen.latest)
            seen.latest = self.now
            if emission.finish:
                seen.end = self.now
                bar.update()

    def report(self) -> dict[str, Any]:
        """The figures."""
        stats = self.manager.stats()
        preemptions = self.scheduler.preemption_stats()
        first = [seen.first - seen.arrival for seen in self.seen.values() if seen.first >= 0]
        gaps = [gap for seen in self.seen.values() for gap in seen.gaps]
        wall = self.scheduler_seconds + self.kvstore_seconds
        return {
            "requests": self.num_requests,
            "finished": sum(seen.end >= 0 for seen in self.seen.values()),
            "failed": self.num_failed,
            "steps": self.num_steps,
            "steps_per_s": self.num_steps / wall,
            "scheduler_us_per_step": 1e6 * self.scheduler_seconds / self.num_steps,
            "kvstore_us_per_step": 1e6 * self.kvstore_seconds / self.num_steps,
            "simulated_s": self.now,
            "step_tokens": self.num_step_tokens / self.num_steps,
            "hit_ratio": stats.num_hit_tokens / max(1, stats.num_prompt_tokens),
            "preemptions": preemptions.num_groups,
            "swapped": preemptions.num_swapped,
            "recomputed": preemptions.num_recomputed,
            "ttft_s": _quantiles(first),
            "itl_s": _quantiles(gaps),
        }


def _quantiles(values: list[float]) -> dict[str, float]:
    parts = statistics.quantiles(values, n=100) if len(values) > 1 else [*values] * 99
    return {"p50": parts[49], "p99": parts[98], "max": max(values)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake .jsonl or Azure .csv")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--num-blocks", type=int, default=8192)
    parser.add_argument("--host-blocks", type=int, default=0)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--step-target", type=float, default=0.05, help="seconds")
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--decode-ms", type=float, default=0.04)
    parser.add_argument("--prompt-ms", type=float, default=0.05)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="write a PNG")
    return parser.parse_args()


def main() -> None:
    options = _options()
    shapes = workload.trace(options.trace, options.requests)
    simulation = Simulation(shapes, options)
    asyncio.run(simulation.run())
    report = simulation.report()
    table = Table("figure", "value")
    for name, value in report.items():
        if isinstance(value, dict):
            text = ", ".join(f"{key} {part:.3f}" for key, part in value.items())
        else:
            text = f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
        table.add_row(name, text)
    Console().print(table)
    kept = {key: value for key, value in vars(options).items() if key not in ("json", "plot")}
    if options.json:
        kept["trace"] = options.trace.name
        text = json.dumps({"options": kept, "report": report}, default=str, indent=2)
        options.json.write_text(text + "\n")
    if options.plot:
        draw(simulation.samples, options.num_blocks, options.trace.name, options.plot)


if __name__ == "__main__":
    main()
