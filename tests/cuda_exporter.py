"""A process that has a pool on a device of a fake machine, and hands out its handle."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from compute.types import CudaIpcMemory, PoolHandle, PoolLayout

_CODE = """
    import json, sys, time
    from pathlib import Path
    from kvstore.cuda_pool import CudaStorage
    from kvstore.fake_cuda import FakeCuda
    from kvstore.types import KvShape, PoolLayout
    folder, device, layout = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    shape = KvShape(**layout.pop("shape"))
    (folder / "shm").mkdir(exist_ok=True)
    storage = CudaStorage(FakeCuda(folder), device, folder / "shm")
    pool = storage.create(PoolLayout(shape, **layout), 0, 4096)
    memory, offset = pool.export()
    said = [memory.handle.hex(), memory.device_uuid.hex()]
    said += [memory.exporter_pid, memory.exporter_pid_namespace, offset]
    print(json.dumps(said), flush=True)
    time.sleep(600)
"""


class ExporterProcess:
    """Runs from construction to `kill`. `handle` is that of its pool, `pages` its memory."""

    num_made = 0

    def __init__(self, folder: Path, layout: PoolLayout, device: int = 0) -> None:
        known = set((folder / f"device-{device}").iterdir())
        sizes = json.dumps(dataclasses.asdict(layout))
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_CODE), str(folder), str(device), sizes],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        handle, device_uuid, pid, namespace, offset = json.loads(self._process.stdout.readline())
        memory = CudaIpcMemory(bytes.fromhex(handle), bytes.fromhex(device_uuid), pid, namespace)
        ExporterProcess.num_made += 1
        generation = ExporterProcess.num_made
        self.handle = PoolHandle(memory, offset, layout.pool_bytes, layout, generation)
        (self.pages,) = set((folder / f"device-{device}").iterdir()) - known

    def kill(self) -> None:
        """Safe to repeat."""
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
