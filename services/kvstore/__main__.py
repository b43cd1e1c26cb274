"""The kvstore binary: `quire serve-kvstore`."""

from __future__ import annotations

import sys

from quire.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc

from kvstore.attachment import ManagerOptions
from kvstore.manager import PageManager
from kvstore.posix_pool import check_room, sweep
from services.common import binary, config
from services.common.server import GrpcServer, stop_signal
from services.common.startup import StartupReport
from services.kvstore.servicer import KvCacheServicer

_SERVICE = kvstore_pb2.DESCRIPTOR.services_by_name["KvCacheService"].full_name


async def serve(settings: config.KvStoreSettings, report: StartupReport) -> None:
    stopped = stop_signal()
    kv_memory = config.memory_bytes(settings.kv_memory)
    # The pool comes with the first attachment, long after whoever starts us could be told.
    sweep()
    check_room(kv_memory)
    manager = PageManager(ManagerOptions(kv_memory, settings.block_size))
    server = GrpcServer(
        settings.listen,
        [_SERVICE],
        lambda grpc_server: kvstore_pb2_grpc.add_KvCacheServiceServicer_to_server(
            KvCacheServicer(manager), grpc_server
        ),
    )
    try:
        await server.start()
        await server.set_serving(True)
        report.ready(listen=settings.listen)
        await stopped.wait()
    finally:
        await server.stop(grace=1.0)
        manager.close()


def main(arguments: list[str]) -> int:
    settings = config.load(config.KvStoreSettings, "serve-kvstore", arguments)
    return binary.run("kvstore", settings, serve)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
