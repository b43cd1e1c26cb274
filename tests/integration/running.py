"""The real thing: three processes, the real model, a free port each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

START_SECONDS = 180
STOP_SECONDS = 30


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pools_of(kvstore: psutil.Process) -> set[Path]:
    """The shared memory that a kvstore owns. Others on this machine have theirs."""
    paths = {Path(file.path) for file in kvstore.open_files()}
    return {path for path in paths if path.name.startswith("quire-") and not path.suffix}


@dataclass
class Running:
    """A started `quire up`. `log` grows while it runs."""

    process: subprocess.Popen
    http: str
    grpc: str
    log: Path

    @property
    def url(self) -> str:
        return f"http://{self.http}"

    def child(self, service: str) -> psutil.Process:
        """The process of one service."""
        for child in psutil.Process(self.process.pid).children():
            if f"services.{service}" in child.cmdline():
                return child
        raise LookupError(f"{service} is not running")

    def wait_started(self) -> None:
        """Until the supervisor has announced the addresses."""
        deadline = time.monotonic() + START_SECONDS
        while "Quire serves" not in self.log.read_text():
            assert self.process.poll() is None, f"quire up ended early:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"not started:\n{self.log.read_text()}"
            time.sleep(0.1)

    def wait_logged(self, text: str, seconds: float = 10) -> None:
        """Until a line with `text` has come through the supervisor."""
        deadline = time.monotonic() + seconds
        while text not in self.log.read_text():
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.log.read_text()}"
            time.sleep(0.05)

    def wait_ready(self, seconds: float) -> None:
        """Until /health/ready says so."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"quire up ended early:\n{self.log.read_text()}")
            try:
                if httpx.get(f"{self.url}/health/ready", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise AssertionError(f"not ready after {seconds} s:\n{self.log.read_text()}")

    def stop(self) -> int:
        """Ctrl-C; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_SECONDS)


def start_quire(log: Path, *flags: str, env: dict[str, str] | None = None) -> Running:
    """Start `quire up` on free ports, with its output in `log`."""
    http, grpc = (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = [sys.executable, "-m", "services.cli", "up", "--http", http, "--grpc", grpc, *flags]
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=sink, env=os.environ | (env or {}), start_new_session=True
        )
    return Running(process, http, grpc, log)
