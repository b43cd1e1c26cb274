"""A page manager behind gRPC, in this process."""

from __future__ import annotations

from pathlib import Path

from quire.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc

from kvstore.manager import PageManager
from services.common.server import GrpcServer
from services.kvstore.servicer import KvCacheServicer


async def started(manager: PageManager, folder: Path) -> GrpcServer:
    """A server on a socket in `folder`, listening; whoever asks for it stops it."""
    server = GrpcServer(
        f"unix:{folder / 'kv.sock'}",
        [kvstore_pb2.DESCRIPTOR.services_by_name["KvCacheService"].full_name],
        lambda s: kvstore_pb2_grpc.add_KvCacheServiceServicer_to_server(
            KvCacheServicer(manager), s
        ),
    )
    await server.start()
    return server
