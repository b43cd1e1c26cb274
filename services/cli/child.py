"""One service process under the supervisor."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from services.common.startup import STATUS_FD

Show = Callable[[str, str], None]  # service name, log line
Progress = Callable[[str, str, int, int], None]  # service name, stage, done, total

_PR_SET_PDEATHSIG = 1


class ChildFailed(Exception):
    """The child said that it cannot start, or exited before it was ready."""


class Child:
    """A process whose log lines and startup reports are followed.

    States: new, starting, ready, exited. `exited` resolves to the exit status.
    """

    def __init__(self, name: str, show: Show, progress: Progress) -> None:
        self.name = name
        self._show = show
        self._progress = progress
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self.process: asyncio.subprocess.Process | None = None
        self.exited: asyncio.Task[int] | None = None

    async def start(self, module: str, flags: list[str], environment: dict[str, str]) -> None:
        """Run `python -m module flags` in a session of its own.

        Ctrl-C in a terminal reaches the whole foreground process group; the child is
        outside of it, so that the supervisor alone decides the order of shutdown.
        """
        reader, writer = os.pipe()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # the user's folder may have files named like modules
            "-m",
            module,
            *flags,
            env=environment | {STATUS_FD: str(writer), "PYTHONUNBUFFERED": "1"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=(writer,),
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        os.close(writer)
        self._tasks = [
            asyncio.create_task(self._follow_output()),
            asyncio.create_task(self._follow_reports(reader)),
        ]
        self.exited = asyncio.create_task(self._wait())

    async def ready(self) -> None:
        """Wait until the child is ready. Raises ChildFailed if it never will be."""
        await asyncio.shield(self._ready)

    async def stop(self, patience: float) -> None:
        """Ask the child to end; kill it if it has not after `patience` seconds."""
        if self.process is None or self.exited is None:
            return
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.shield(self.exited), patience)
        except TimeoutError:
            self._show(self.name, f"did not end within {patience:g} s; killed")
            self.kill()
            await self.exited

    def kill(self) -> None:
        """End the process at once. Safe to repeat."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    async def _wait(self) -> int:
        assert self.process is not None
        status = await self.process.wait()
        await asyncio.gather(*self._tasks)
        self._fail(f"{ending(status)} before it was ready")
        return status

    async def _follow_output(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self._show(self.name, line.decode(errors="replace").rstrip("\n"))

    async def _follow_reports(self, descriptor: int) -> None:
        stream = asyncio.StreamReader()
        pipe = os.fdopen(descriptor, "rb")
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
        async for line in stream:
            self._report(json.loads(line))

    def _report(self, report: dict[str, Any]) -> None:
        if "failed" in report:
            self._fail(report["failed"])
        elif "ready" in report:
            self._progress(self.name, "ready", 1, 1)
            if not self._ready.done():
                self._ready.set_result(None)
        else:
            self._progress(self.name, report["stage"], report["done"], report["total"])

    def _fail(self, text: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(ChildFailed(f"{self.name}: {text}"))
            self._ready.exception()  # seen, even if nobody waits any more


def ending(status: int) -> str:
    """What an exit status says, in words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:  # a number without a name
        return f"was ended by signal {-status}"


def _die_with_parent() -> None:
    """Have the kernel end this process if the supervisor is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
