"""A driver's updates over one stream to the kvstore."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
from quire.kvstore.v1 import kvstore_pb2 as pb
from quire.kvstore.v1 import kvstore_pb2_grpc

from gateway.errors import WorkerUnavailable
from services.gateway.unavailable import unavailable


class UpdateStream:
    """One update at a time, in order; a call each would cost three times as much.

    The stream is opened when it is needed, and given up after any failure: what became of
    an update that was not answered is unknown, and the next one may meet another kvstore.
    """

    def __init__(self, stub: kvstore_pb2_grpc.KvCacheServiceStub, timeout: float) -> None:
        """`timeout`: seconds that an answer may take."""
        self._stub, self._timeout = stub, timeout
        self._call: grpc.aio.StreamStreamCall | None = None
        self._turn = asyncio.Lock()

    async def send(self, update: pb.UpdateSequencesRequest) -> pb.UpdateSequencesResponse:
        """Raises WorkerUnavailable if the kvstore is out of reach or refuses."""
        async with self._turn:
            call, self._call = self._call, None
            if call is None or call.done():  # since the last update: nothing is lost
                call = self._stub.DriveSequences()
            try:
                async with asyncio.timeout(self._timeout):
                    response = await _exchange(call, pb.DriveSequencesRequest(update=update))
            except grpc.RpcError as error:
                raise unavailable("kvstore", error) from None
            except TimeoutError:
                call.cancel()
                raise WorkerUnavailable("kvstore does not answer") from None
            except asyncio.CancelledError:
                call.cancel()
                raise
            self._call = call
            return response.update

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None


async def _exchange(
    call: grpc.aio.StreamStreamCall, request: pb.DriveSequencesRequest
) -> pb.DriveSequencesResponse:
    """Raises RpcError with what ended the stream."""
    with contextlib.suppress(asyncio.InvalidStateError):  # it has ended; reading says why
        await call.write(request)
    response = await call.read()
    if response is grpc.aio.EOF:
        raise WorkerUnavailable("kvstore has ended the stream")
    return response
