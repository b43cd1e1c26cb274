"""The kvstore binary: `quire serve-kvstore`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

import structlog
from quire.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc

from kvstore import cupy_runtime
from kvstore.attachment import ManagerOptions
from kvstore.errors import InvalidRequest
from kvstore.manager import PageManager
from kvstore.ports import CudaRuntime
from kvstore.types import TenantLimits
from services.common import binary, config
from services.common.option_values import (
    device_number,
    memory_bytes,
    memory_share,
    tenant_limits,
)
from services.common.server import GrpcServer, stop_signal
from services.common.startup import StartupError, StartupReport
from services.kvstore import pool_storage
from services.kvstore.killer import KILL_POINT, killer
from services.kvstore.servicer import KvCacheServicer
from services.kvstore.upkeep import Upkeep

_log = structlog.get_logger()
_SERVICE = kvstore_pb2.DESCRIPTOR.services_by_name["KvCacheService"].full_name


async def serve(
    settings: config.KvStoreSettings,
    report: StartupReport,
    connect: Callable[[], CudaRuntime] = cupy_runtime.connect,
) -> None:
    """Listen until a signal says otherwise. `connect` gives CUDA, if it is asked for."""
    stopped = stop_signal()
    options = manager_options(settings)
    storage = pool_storage.find(settings, connect)
    try:
        manager = PageManager(options, storage, reached=killer(os.environ.get(KILL_POINT)))
    except InvalidRequest as error:
        raise StartupError(f"--{error}") from None
    if manager.recovered:
        _log.info("recovery", outcome=manager.recovered)
    if not manager.is_attached:
        pool_storage.check(storage, options)
    servicer = KvCacheServicer(manager)
    server = GrpcServer(
        settings.listen,
        [_SERVICE],
        lambda grpc_server: kvstore_pb2_grpc.add_KvCacheServiceServicer_to_server(
            servicer, grpc_server
        ),
    )
    upkeep = asyncio.create_task(Upkeep(manager, settings.audit_after).run())
    try:
        await server.start()
        await server.set_serving(True)
        report.ready(listen=settings.listen)
        await stopped.wait()
    finally:
        upkeep.cancel()
        servicer.event_streams.close()
        await server.stop(grace=1.0)
        if settings.keep_pool:
            manager.leave()
        manager.close()


def manager_options(settings: config.PoolSettings) -> ManagerOptions:
    limits = tenant_limits(settings.tenants)
    is_on_host = device_number(settings.device) is None
    share = 0.0 if is_on_host else memory_share(settings.kv_memory)
    return ManagerOptions(
        kv_memory_bytes=0 if share else memory_bytes(settings.kv_memory),
        kv_memory_share=share,
        block_size=settings.block_size,
        host_memory_bytes=memory_bytes(settings.host_memory),
        tenants={name: TenantLimits(*pair) for name, pair in limits.items()},
        eviction=settings.eviction,
        pin_share=settings.pin_share,
        tenant_pin_share=settings.tenant_pin_share,
    )


def main(arguments: list[str]) -> int:
    settings = config.load(config.KvStoreSettings, "serve-kvstore", arguments)
    return binary.run("kvstore", settings, serve)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
