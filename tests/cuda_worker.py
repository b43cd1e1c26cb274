"""A compute process that maps a pool and does as it is told, without a model.

`python -m tests.cuda_worker MACHINE ADDRESS`: MACHINE is the folder of a fake one, or `cuda`. A
list in JSON comes in on each line, the name of a method and its arguments; its answer goes
out as one, or `{"error": …}`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from compute import cupy_runtime
from compute.cuda_pool import CudaIpcMapper
from compute.errors import ComputeError
from compute.fake_cuda import FakeCuda
from compute.pool import AttachedPool
from compute.types import KvShape
from services.compute.pool_provider import GrpcPoolProvider


class Worker:
    """What a compute worker does with a pool."""

    def __init__(self, machine: str, address: str) -> None:
        self._provider = GrpcPoolProvider(address)
        self._machine = machine
        self._pool: AttachedPool | None = None

    def attach(self, shape: dict, **options) -> int:
        """The generation of the pool."""
        kv_shape = KvShape(**shape)
        handle = self._provider.attach_pool(kv_shape)
        is_real = self._machine == "cuda"
        cuda = cupy_runtime.connect() if is_real else FakeCuda(Path(self._machine), **options)
        self._pool = AttachedPool(handle, kv_shape, CudaIpcMapper(cuda, 0))
        return handle.generation

    def fill(self, block: int, value: float) -> None:
        self._pool.tensor[block] = value
        if self._pool.tensor.is_cuda:
            torch.cuda.synchronize()

    def read(self, block: int) -> list[float]:
        """The different elements of a block."""
        return self._pool.tensor[block].float().unique().tolist()

    def is_orphaned(self) -> bool:
        return self._pool.is_orphaned()

    def close(self) -> None:
        self._pool.close()


class WorkerProcess:
    """That, in a process of its own. Methods are those of Worker."""

    def __init__(self, machine: Path | str, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.cuda_worker", str(machine), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def call(self, name: str, *arguments, **options):
        """Raises RuntimeError with the reason and the text of what went wrong."""
        self._process.stdin.write(json.dumps([name, arguments, options]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def main(machine: str, address: str) -> None:
    worker = Worker(machine, address)
    for line in sys.stdin:
        name, arguments, options = json.loads(line)
        try:
            answer = {"value": getattr(worker, name)(*arguments, **options)}
        except ComputeError as error:
            answer = {"error": f"{error.reason}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
