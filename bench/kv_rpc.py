"""What one decode step costs at the kvstore through gRPC on a Unix socket.

A service process of its own; each measurement has the building of the messages in it.

    python -m bench.kv_rpc
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from quire.common.v1 import common_pb2
from quire.kvstore.v1 import kvstore_pb2 as pb
from quire.kvstore.v1 import kvstore_pb2_grpc
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

_SHAPE = common_pb2.KvShape(
    layer_count=1, kv_head_count=1, head_size=8, dtype=common_pb2.DTYPE_BFLOAT16
)
_PROMPT = 100


class Steps:
    """Extends all sequences by one token, over and over."""

    def __init__(self, num_sequences: int, num_steps: int) -> None:
        self._num_sequences, self._num_steps = num_sequences, num_steps
        self._length = _PROMPT + 16

    async def open(self, stub: kvstore_pb2_grpc.KvCacheServiceStub) -> None:
        await stub.AttachPool(pb.AttachPoolRequest(shape=_SHAPE))
        plans = [
            pb.OpenPlan(
                sequence_id=str(number),
                # Of different lengths, so that every step needs some blocks.
                token_ids=range(number * 1000, number * 1000 + _PROMPT + number % 16),
                namespace=common_pb2.Namespace(model_fingerprint=b"bench"),
            )
            for number in range(self._num_sequences)
        ]
        await stub.OpenSequences(pb.OpenSequencesRequest(plans=plans))

    async def measure(self, name: str, step: Callable[[list[Any]], Awaitable[Any]]) -> list[float]:
        """Milliseconds of each step."""
        spent = []
        for _ in tqdm(range(self._num_steps), desc=name, leave=False):
            self._length += 1
            started = time.perf_counter()
            await step(
                [
                    pb.ExtendPlan(sequence_id=str(number), length=self._length + number % 16)
                    for number in range(self._num_sequences)
                ]
            )
            spent.append(1e3 * (time.perf_counter() - started))
        return spent


async def run(address: str, options: argparse.Namespace) -> dict[str, list[float]]:
    steps = Steps(options.sequences, options.steps)
    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
        stub = kvstore_pb2_grpc.KvCacheServiceStub(channel)
        await steps.open(stub)

        async def unary(plans: list[Any]) -> None:
            await stub.ExtendSequences(pb.ExtendSequencesRequest(plans=plans))

        async def empty(_: list[Any]) -> None:
            await stub.ExtendSequences(pb.ExtendSequencesRequest())

        call = stub.DriveSequences()

        async def stream(plans: list[Any]) -> None:
            update = pb.UpdateSequencesRequest(extends=plans)
            await call.write(pb.DriveSequencesRequest(update=update))
            await call.read()

        figures = {
            "stream (DriveSequences)": await steps.measure("stream", stream),
            "call (ExtendSequences)": await steps.measure("call", unary),
            "call without sequences": await steps.measure("empty", empty),
        }
        call.cancel()
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/kv.sock"
        command = [sys.executable, "-m", "services.kvstore", f"--listen={address}", "--no-recover"]
        service = subprocess.Popen(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL
        )
        try:
            figures = asyncio.run(run(address, options))
        finally:
            service.terminate()
            service.wait()
    table = Table(title=f"a step of {options.sequences} sequences, ms")
    for heading in ("", "median", "10 %", "90 %"):
        table.add_column(heading, justify="right" if heading else "left")
    report = {}
    for name, spent in figures.items():
        cuts = statistics.quantiles(spent, n=10)
        report[name] = {"median": cuts[4], "p10": cuts[0], "p90": cuts[8]}
        table.add_row(name, *(f"{value:.2f}" for value in report[name].values()))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
