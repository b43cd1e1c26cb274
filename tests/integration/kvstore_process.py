"""A kvstore in a process of its own, over a socket, and what it leaves in shared memory."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
from quire.common.v1 import common_pb2
from quire.kvstore.v1 import kvstore_pb2 as pb
from quire.kvstore.v1 import kvstore_pb2_grpc

START_SECONDS = 60
STOP_SECONDS = 30
SHAPE = common_pb2.KvShape(
    layer_count=1, kv_head_count=1, head_size=8, dtype=common_pb2.DTYPE_FLOAT32
)
BLOCK_SIZE = 8
BLOCK_BYTES = BLOCK_SIZE * 2 * 8 * 4


class KvStoreProcess:
    """`services.kvstore` on a socket in `folder`, started again at the same address.

    Its pools are found by the instance that the address stands for, so that tests side by
    side leave each other's alone.
    """

    def __init__(self, folder: Path, num_blocks: int, num_host_blocks: int = 0, **flags) -> None:
        self.address = f"unix:{folder / 'kv.sock'}"
        self.log = folder / "log"
        flags |= {
            "listen": self.address,
            "kv_memory": num_blocks * BLOCK_BYTES,
            "host_memory": num_host_blocks * BLOCK_BYTES,
            "block_size": BLOCK_SIZE,
        }
        self._flags = [f"--{key.replace('_', '-')}={value}" for key, value in flags.items()]
        self._process: subprocess.Popen | None = None

    def start(self, kill_point: str = "") -> None:
        """Until it answers."""
        self.launch(kill_point)
        with self.channel() as channel:
            try:
                grpc.channel_ready_future(channel).result(START_SECONDS)
            except grpc.FutureTimeoutError:
                raise AssertionError(self.log.read_text()) from None

    def launch(self, kill_point: str = "") -> None:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        if kill_point:
            env["QUIRE_TEST_KILL_POINT"] = kill_point
        command = [sys.executable, "-P", "-m", "services.kvstore", *self._flags]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=env, start_new_session=True
            )

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.address)

    @staticmethod
    def stub(channel: grpc.Channel) -> kvstore_pb2_grpc.KvCacheServiceStub:
        return kvstore_pb2_grpc.KvCacheServiceStub(channel)

    def wait(self) -> int:
        """Until it ends by itself; its exit status."""
        return self._process.wait(STOP_SECONDS)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """Ask it to end; the exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def objects(self) -> list[Path]:
        """What there is of its pools."""
        tag = hashlib.sha256(self.address.encode()).hexdigest()[:8]
        return sorted(Path("/dev/shm").glob(f"quire-{tag}-*"))

    def end(self) -> None:
        """Leave nothing, whatever happened."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
        for path in self.objects():
            path.unlink(missing_ok=True)


def wait_until(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def listed(stub) -> dict[str, pb.SequenceInfo]:
    request = pb.ListSequencesRequest(page_size=1000, include_tokens=True)
    return {one.sequence_id: one for one in stub.ListSequences(request).sequences}


def findings(stub) -> list[pb.AuditFinding]:
    return list(stub.AuditPool(pb.AuditPoolRequest()).findings)
