"""The page pool, asked for over gRPC."""

from __future__ import annotations

import grpc
from quire.kvstore.v1 import kvstore_pb2 as pb
from quire.kvstore.v1 import kvstore_pb2_grpc

from compute.errors import LayoutMismatch, PoolUnavailable
from compute.types import KvShape, PoolHandle
from services.common.errors import error_details
from services.common.server import CHANNEL_OPTIONS
from services.compute import codec

# The first call reserves and clears the whole pool, which takes seconds per 10 GB.
_ATTACH_SECONDS = 120.0


class GrpcPoolProvider:
    """compute.ports.PoolProvider over a kvstore. Blocks; not for an event loop."""

    def __init__(self, target: str) -> None:
        """`target` is HOST:PORT or unix:PATH. Connects when first used."""
        self._target = target
        self._channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._stub = kvstore_pb2_grpc.KvCacheServiceStub(self._channel)

    def attach_pool(self, shape: KvShape) -> PoolHandle:
        request = pb.AttachPoolRequest(shape=codec.shape_message(shape))
        try:
            response = self._stub.AttachPool(request, timeout=_ATTACH_SECONDS)
        except grpc.RpcError as error:
            details = error_details(error)
            if details.reason == LayoutMismatch.reason:
                raise LayoutMismatch(details.message, **details.metadata) from None
            text = f"kvstore at {self._target}: {details.message}"
            raise PoolUnavailable(text, **details.metadata) from None
        return codec.attached(response)

    def close(self) -> None:
        self._channel.close()
