"""Tokens per second of the engine alone, beside what its matrix products allow.

Decode steps run through compute.runner.StepRunner over a private pool, without services.
The bound is the time of the step's matrix products and nothing else, on weights of the
same shapes, called both ways torch offers on a CPU: `linear` (torch.nn.functional) and
`packed` (oneDNN with weights in its own order). The three alternate, a few steps at a
time, so that what else the machine does hits them alike; medians are compared.

    python -m bench.engine --batch 1 8 32 --json engine.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from bench import scheduler_time
from compute import threads
from compute.config import ModelConfig
from compute.dtypes import torch_dtype
from compute.fakes import PrivatePool
from compute.kernels.cpu import CpuKernels
from compute.loading import load_model
from compute.runner import StepRunner
from compute.types import Chunk, SamplingOptions, SequenceState, Step
from services.common import config, model_files

_BURST = 4  # steps in a row of one kind before the next has its turn


def main() -> None:
    arguments = _arguments()
    threads.configure(arguments.threads)
    cache_dir = config.ModelSettings().cache_dir
    files = model_files.find(arguments.model, cache_dir, lambda *_: None)
    kernels = CpuKernels()
    loaded = load_model(files.directory, files.weights, arguments.dtype, kernels)
    model_config = loaded.decoder.config
    num_bursts = -(-arguments.steps // _BURST)
    length = arguments.prompt + num_bursts * (_BURST + 1)
    blocks = max(arguments.batch) * -(-length // arguments.block_size)
    bound = _Products(model_config, torch_dtype(arguments.dtype))
    with PrivatePool(num_blocks=blocks, block_size=arguments.block_size) as pool:
        runner = StepRunner(
            loaded.decoder, kernels, pool, model_id=files.model_id, fingerprint=loaded.fingerprint
        )
        rows = [_measure(runner, bound, size, arguments) for size in arguments.batch]
        runner.close()
    _print(rows, arguments)
    scheduler_rows = [scheduler_time.measure(size) for size in (1, 64, 256)]
    _print_scheduler(scheduler_rows)
    if arguments.json:
        report = {"machine": _machine(arguments), "rows": rows, "scheduler": scheduler_rows}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def _print_scheduler(rows: list[dict[str, Any]]) -> None:
    """What the scheduler takes for a step; only `in_the_way` is not hidden behind compute."""
    table = Table(*rows[0], title="scheduler, µs per step")
    for row in rows:
        table.add_row(*(f"{value:,.0f}" for value in row.values()))
    Console().print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=config.DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=48, help="tokens in each prompt")
    parser.add_argument("--steps", type=int, default=64, help="decode steps to measure")
    parser.add_argument("--block-size", type=int, default=16, choices=[8, 16, 32])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def _measure(
    runner: StepRunner, bound: _Products, batch: int, arguments: argparse.Namespace
) -> dict[str, float]:
    """Median seconds per step of each kind, and what follows from them."""
    steps = _decode_steps(runner, batch, arguments.prompt)
    kinds: dict[str, Callable[[], Any]] = {
        "engine": lambda: runner.run(next(steps)),
        "linear": lambda: bound.linear(batch),
        "packed": lambda: bound.packed(batch),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    runner.run(next(steps))  # the prompts
    with tqdm(total=arguments.steps, desc=f"batch {batch}", leave=False) as bar:
        while len(seconds["engine"]) < arguments.steps:
            for kind, step in kinds.items():
                step()  # the other kinds have emptied the caches
                for _ in range(_BURST):
                    started = time.perf_counter()
                    step()
                    seconds[kind].append(time.perf_counter() - started)
            bar.update(_BURST)
    runner.reset()
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    best_bound = min(medians["linear"], medians["packed"])
    rates = {f"{kind}_tokens_per_second": batch / value for kind, value in medians.items()}
    return {"batch": batch, **rates, "share_of_bound": best_bound / medians["engine"]}


def _decode_steps(runner: StepRunner, batch: int, prompt_length: int) -> Iterator[Step]:
    """First a step with all prompts, then one decode step after another."""
    layout = runner.handle().layout
    free = list(range(layout.num_blocks))
    random.Random(0).shuffle(free)
    per_sequence = layout.num_blocks // batch
    names = [f"{batch}/{n}" for n in range(batch)]
    vocab_size = runner.info().vocab_size
    states = [
        SequenceState(
            name,
            random.Random(n).choices(range(vocab_size), k=prompt_length),
            free[n * per_sequence : (n + 1) * per_sequence],
            SamplingOptions(),
        )
        for n, name in enumerate(names)
    ]
    prompts = [Chunk(name, 0, prompt_length, True) for name in names]
    yield Step(0, sequences=states, chunks=prompts)
    length = prompt_length
    while True:
        yield Step(length, chunks=[Chunk(name, length, 1, True) for name in names])
        length += 1


class _Products:
    """The matrix products of one step, on random weights of the model's shapes."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        hidden, heads = model.hidden_size, model.num_q_heads * model.head_size
        qkv = heads + 2 * model.num_kv_heads * model.head_size
        layer = [(qkv, hidden), (hidden, heads)]
        layer += [(2 * model.intermediate_size, hidden), (hidden, model.intermediate_size)]
        shapes = layer * model.num_layers + [(model.vocab_size, hidden)]
        self._dense = [torch.randn(shape, dtype=dtype) * 0.02 for shape in shapes]
        self._inputs: dict[tuple[int, int], torch.Tensor] = {}
        self._packed: list[torch.Tensor] | None
        try:
            pack = torch.ops.mkldnn._reorder_linear_weight.default
            self._packed = [pack(weight) for weight in self._dense]
        except (AttributeError, RuntimeError):
            self._packed = None

    @torch.inference_mode()
    def linear(self, num_rows: int) -> None:
        for weight in self._dense:
            torch.nn.functional.linear(self._input(num_rows, weight), weight)

    @torch.inference_mode()
    def packed(self, num_rows: int) -> None:
        if self._packed is None:
            return self.linear(num_rows)
        multiply = torch.ops.mkldnn._linear_pointwise.default
        for weight, packed in zip(self._dense, self._packed, strict=True):
            multiply(self._input(num_rows, weight), packed, None, "none", [], "")
        return None

    def _input(self, num_rows: int, weight: torch.Tensor) -> torch.Tensor:
        key = (num_rows, weight.shape[1])
        if key not in self._inputs:
            self._inputs[key] = torch.randn(key, dtype=weight.dtype)
        return self._inputs[key]


def _machine(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": arguments.model,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def _print(rows: list[dict[str, float]], arguments: argparse.Namespace) -> None:
    table = Table(title=f"decode tokens/s, {arguments.dtype}, {arguments.threads} threads")
    for heading in ("batch", "engine", "bound: linear", "bound: packed", "engine / bound"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row['batch']:.0f}",
            f"{row['engine_tokens_per_second']:.1f}",
            f"{row['linear_tokens_per_second']:.1f}",
            f"{row['packed_tokens_per_second']:.1f}",
            f"{row['share_of_bound']:.0%}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
