"""Bootstrap of a gRPC server: errors, health, reflection, limits, orderly shutdown."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common.errors import ErrorInterceptor
from services.common.startup import StartupError

MAX_MESSAGE_BYTES = 4 * 1024 * 1024

SERVER_OPTIONS = (
    # Two servers on one port would each get a share of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Clients ping to notice a stopped peer; the default would close on them.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A driver whose host has vanished must not keep its seat for hours.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # What newer versions heed instead of keepalive_timeout_ms; its default is a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    # The default waits up to two minutes between attempts to reconnect.
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class GrpcServer:
    """A server that says NOT_SERVING until `serving` is called.

    States: created, started, serving, stopped.
    """

    def __init__(
        self,
        address: str,
        services: Sequence[str],
        register: Callable[[grpc.aio.Server], None],
    ) -> None:
        """`services` are the full names to reflect; `register` adds their servicers."""
        self.address = address
        self._services = services
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        register(self._server)

    async def start(self) -> None:
        """Listen. Raises StartupError if the address cannot be bound."""
        try:
            port = self._server.add_insecure_port(self.address)
        except RuntimeError:
            port = 0
        if port == 0 and not self.address.startswith("unix:"):
            raise StartupError(f"cannot listen on {self.address}: the port is busy or not ours")
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """What `grpc.health.v1` answers, for the server and each service."""
        kinds = health_pb2.HealthCheckResponse
        status = kinds.SERVING if serving else kinds.NOT_SERVING
        for name in ("", *self._services):
            await self._health.set(name, status)

    async def stop(self, grace: float) -> None:
        """Refuse new calls, let running ones end for `grace` seconds, then cut them off."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)


def stop_signal() -> asyncio.Event:
    """An event that SIGINT or SIGTERM sets."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    return stopped
