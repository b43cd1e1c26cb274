"""`quire up`: the three services as processes on Unix sockets, under one supervisor."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from services.cli.child import Child, ChildFailed, ending
from services.cli.runtime_folder import runtime_folder
from services.cli.screen import Screen
from services.common import config, model_files
from services.common.server import stop_signal
from services.common.startup import StartupError

_ORDER = ("kvstore", "compute", "gateway")
_STOP_TIMEOUT = 10.0


def main(arguments: list[str]) -> int:
    settings = config.load(config.UpSettings, "up", arguments)
    for name, address in (("http", settings.http), ("grpc", settings.grpc)):
        _check_free(name, address)
    with Screen() as screen:
        # Fetched here, once, so that two services do not wait for the same download.
        found = model_files.find(
            settings.model,
            settings.cache_dir,
            lambda stage, done, total: screen.progress("quire", stage, done, total),
        )
        with runtime_folder() as runtime:
            return asyncio.run(_Supervisor(settings, found.model_id, runtime, screen).run())


def _check_free(name: str, address: str) -> None:
    """Find a busy port before anything is started."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, proto, _, target = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        text = error.strerror or str(error)
        raise StartupError(f"--{name} {address}: cannot listen there: {text}") from None


class _Supervisor:
    """Starts the services in order and stops them in the opposite one.

    A service that exits ends all: a restart that nobody asked for hides its cause.
    """

    def __init__(
        self, settings: config.UpSettings, model_id: str, runtime: Path, screen: Screen
    ) -> None:
        self._settings = settings
        self._model_id = model_id
        self._sockets = {name: f"unix:{runtime / name}.sock" for name in _ORDER}
        self._screen = screen
        # A person who has not asked for more needs one line per request, not three.
        self._is_watched = screen.is_terminal and "log_level" not in settings.model_fields_set
        self._children: dict[str, Child] = {}

    async def run(self) -> int:
        stopped = asyncio.create_task(stop_signal().wait())
        try:
            if not await self._until(stopped, self._start):
                return 0
            self._screen.announce(self._settings.http, self._settings.grpc, self._model_id)
            return await self._watch(stopped)
        except ChildFailed as error:
            self._screen.fail(str(error))
            return 1
        finally:
            self._screen.clear()
            if stopped.done():
                self._screen.say("stopping; Ctrl-C again to end running requests at once")
            await self._stop()
            if stopped.done():
                self._screen.say("stopped")

    async def _until(
        self, stopped: asyncio.Task[bool], work: Callable[[], Awaitable[None]]
    ) -> bool:
        """Do `work`; False if a stop signal came first."""
        task = asyncio.ensure_future(work())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        task.cancel()
        return False

    async def _start(self) -> None:
        # A pool ends with its supervisor, so there is nothing to take over.
        await self._spawn("kvstore", config.KvStoreSettings, recover=False, keep_pool=False)
        await self._children["kvstore"].ready()
        peers = {"kvstore": self._sockets["kvstore"], "compute": self._sockets["compute"]}
        await self._spawn("compute", config.ComputeSettings, **peers)
        await self._spawn("gateway", config.GatewaySettings, **peers)
        await self._all_ready()

    async def _all_ready(self) -> None:
        """All are ready, or the first failure; a gateway would wait for ever for compute."""
        waits = [asyncio.ensure_future(child.ready()) for child in self._children.values()]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()

    async def _spawn(self, name: str, kind: type[config.LogSettings], **values: str | bool) -> None:
        child = Child(name, self._screen.log, self._screen.progress)
        self._screen.progress(name, "start", 0, 1)
        self._children[name] = child
        values = values | {"listen": self._sockets[name]}
        if self._is_watched and name != "gateway":
            values["log_level"] = "warning"
        known = self._settings.model_dump() | values
        flags = [_flag(field, known[field]) for field in kind.model_fields if field in known]
        await child.start(f"services.{name}", flags, _environment(name, self._settings))

    async def _watch(self, stopped: asyncio.Task[bool]) -> int:
        exits = {child.exited: name for name, child in self._children.items() if child.exited}
        await asyncio.wait({stopped, *exits}, return_when=asyncio.FIRST_COMPLETED)
        for task, name in exits.items():
            if task.done():
                self._screen.fail(f"{name} {ending(task.result())}; stopping the others")
                return 1
        return 0

    async def _stop(self) -> None:
        """Stop all in order, or at once if another signal asks for it."""
        stopping = asyncio.create_task(self._stop_in_order())
        again = asyncio.create_task(stop_signal().wait())
        first: set[asyncio.Task[Any]] = {stopping, again}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            for name in ("gateway", "compute"):  # the kvstore has a pool to remove
                if name in self._children:
                    self._children[name].kill()
        await stopping
        again.cancel()

    async def _stop_in_order(self) -> None:
        """The gateway first, so that it can end its requests while the others still work."""
        for name in reversed(_ORDER):
            if name in self._children:
                grace = self._settings.drain_timeout if name == "gateway" else 0.0
                await self._children[name].stop(_STOP_TIMEOUT + grace)


def _flag(field: str, value: object) -> str:
    name = field.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def _environment(name: str, settings: config.UpSettings) -> dict[str, str]:
    """Only compute does arithmetic; the others must not start threads beside it."""
    environment = dict(os.environ)
    environment.setdefault("NUMBA_CACHE_DIR", str(settings.cache_dir / "kernels"))
    if name != "compute":
        environment["OMP_NUM_THREADS"] = "1"
    return environment
