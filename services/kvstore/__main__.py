"""The kvstore binary: `quire serve-kvstore`."""

from __future__ import annotations

import asyncio
import os
import sys

import structlog
from quire.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc

from kvstore.attachment import ManagerOptions
from kvstore.errors import InvalidRequest
from kvstore.manager import PageManager
from kvstore.posix_pool import PosixStorage, check_room, sweep
from kvstore.types import TenantLimits
from services.common import binary, config
from services.common.server import GrpcServer, stop_signal
from services.common.startup import StartupError, StartupReport
from services.kvstore.killer import KILL_POINT, killer
from services.kvstore.servicer import KvCacheServicer
from services.kvstore.upkeep import Upkeep

_log = structlog.get_logger()
_SERVICE = kvstore_pb2.DESCRIPTOR.services_by_name["KvCacheService"].full_name


async def serve(settings: config.KvStoreSettings, report: StartupReport) -> None:
    stopped = stop_signal()
    options = manager_options(settings)
    storage = PosixStorage(settings.listen if settings.recover else "")
    try:
        manager = PageManager(options, storage, reached=killer(os.environ.get(KILL_POINT)))
    except InvalidRequest as error:
        raise StartupError(f"--{error}") from None
    if manager.recovered:
        _log.info("recovery", outcome=manager.recovered)
    if not manager.is_attached:
        # The pool comes with the first attachment, long after whoever starts us could be told.
        sweep()
        check_room(options.kv_memory_bytes + options.host_memory_bytes)
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
    limits = config.tenant_limits(settings.tenants)
    return ManagerOptions(
        kv_memory_bytes=config.memory_bytes(settings.kv_memory),
        block_size=settings.block_size,
        host_memory_bytes=config.memory_bytes(settings.host_memory),
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
