"""The HTTP server under the REST interface."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from services.common.startup import StartupError


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the binary, which has more than HTTP to shut down."""
        yield


class RestServer:
    """States: created, started, stopped. `address` is HOST:PORT; port 0 takes a free one."""

    def __init__(self, app: ASGIApp, address: str) -> None:
        self._app = app
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen. Raises StartupError if the address cannot be bound."""
        listener = self._listen()
        config = uvicorn.Config(
            self._app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=60,
        )
        # Whatever an application raises is logged there already. What is left are requests
        # that a shutdown cuts off, with a traceback each.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    def _listen(self) -> socket.socket:
        host = self._host.strip("[]")
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, self._port), family=family, backlog=2048)
        except OSError as error:
            reason = error.strerror or str(error)
            raise StartupError(f"cannot listen on {self.address}: {reason}") from None
        # asyncio does this only for sockets that name their protocol. Without it, every
        # answer after the first on a connection waits for the client's delayed ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._port = listener.getsockname()[1]
        return listener

    async def stop(self, grace: float) -> None:
        """Accept nothing more, let running requests end for `grace` seconds, then cut them."""
        if self._server is None or self._serving is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(grace))
        self._server.should_exit = True
        await self._serving
