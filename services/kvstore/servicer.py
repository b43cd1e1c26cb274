"""KvCacheService over the page manager: decode, call, encode."""

# Names and signatures are those of the generated base class.
# ruff: noqa: ARG002, N802

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import structlog
from quire.kvstore.v1 import kvstore_pb2 as pb
from quire.kvstore.v1 import kvstore_pb2_grpc

from kvstore.manager import PageManager
from services.kvstore import codec
from services.kvstore.event_stream import EventStreams

_log = structlog.get_logger()


class KvCacheServicer(kvstore_pb2_grpc.KvCacheServiceServicer):
    """Errors of the domain are raised as they are; the interceptor gives them a status.

    The manager is called on the event loop, which is what makes its calls atomic.
    """

    def __init__(self, manager: PageManager) -> None:
        self._kv = manager
        self.event_streams = EventStreams(manager)

    async def AttachPool(
        self, request: pb.AttachPoolRequest, context: grpc.aio.ServicerContext
    ) -> pb.AttachPoolResponse:
        handle = self._kv.attach_pool(codec.kv_shape(request.shape))
        return pb.AttachPoolResponse(handle=codec.pool_handle(handle))

    async def GetPool(
        self, request: pb.GetPoolRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetPoolResponse:
        return pb.GetPoolResponse(handle=codec.pool_handle(self._kv.get_pool()))

    async def OpenSequences(
        self, request: pb.OpenSequencesRequest, context: grpc.aio.ServicerContext
    ) -> pb.OpenSequencesResponse:
        opened = self._kv.open_sequences([codec.open_plan(plan) for plan in request.plans])
        return pb.OpenSequencesResponse(sequences=codec.opened(opened))

    async def ForkSequences(
        self, request: pb.ForkSequencesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ForkSequencesResponse:
        forked = self._kv.fork_sequences([codec.fork_plan(plan) for plan in request.plans])
        return pb.ForkSequencesResponse(sequences=codec.forked(forked))

    async def TruncateSequences(
        self, request: pb.TruncateSequencesRequest, context: grpc.aio.ServicerContext
    ) -> pb.TruncateSequencesResponse:
        self._kv.truncate_sequences([codec.truncate_plan(plan) for plan in request.plans])
        return pb.TruncateSequencesResponse()

    async def ExtendSequences(
        self, request: pb.ExtendSequencesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ExtendSequencesResponse:
        extended = self._kv.extend_sequences([codec.extend_plan(plan) for plan in request.plans])
        return pb.ExtendSequencesResponse(sequences=codec.extended(extended))

    async def CommitBlocks(
        self, request: pb.CommitBlocksRequest, context: grpc.aio.ServicerContext
    ) -> pb.CommitBlocksResponse:
        self._kv.commit_blocks([codec.commit_plan(plan) for plan in request.plans])
        return pb.CommitBlocksResponse()

    async def CloseSequences(
        self, request: pb.CloseSequencesRequest, context: grpc.aio.ServicerContext
    ) -> pb.CloseSequencesResponse:
        self._kv.close_sequences(request.sequence_ids)
        return pb.CloseSequencesResponse()

    async def AcquireDriverLease(
        self, request: pb.AcquireDriverLeaseRequest, context: grpc.aio.ServicerContext
    ) -> pb.AcquireDriverLeaseResponse:
        epoch, num_closed = self._kv.acquire_driver_lease()
        _log.info("driver", driver_id=request.driver_id, num_closed_sequences=num_closed)
        return pb.AcquireDriverLeaseResponse(epoch=epoch, closed_sequence_count=num_closed)

    async def ReleaseDriverLease(
        self, request: pb.ReleaseDriverLeaseRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReleaseDriverLeaseResponse:
        self._kv.release_driver_lease(request.epoch)
        return pb.ReleaseDriverLeaseResponse()

    async def UpdateSequences(
        self, request: pb.UpdateSequencesRequest, context: grpc.aio.ServicerContext
    ) -> pb.UpdateSequencesResponse:
        closed = [sequence_id for sequence_id in request.closes if self._kv.is_open(sequence_id)]
        request_ids = {plan.sequence_id: plan.request_id for plan in request.opens}
        result = self._kv.update(codec.update(request), request.driver_epoch)
        for opened in result.opened:
            _log.info(
                "sequence opened",
                request_id=request_ids[opened.sequence_id],
                sequence_id=opened.sequence_id,
                num_blocks=len(opened.block_ids),
                num_cached_tokens=opened.num_cached_tokens,
            )
        for refusal in result.refused:
            _log.debug("refused", sequence_id=refusal.sequence_id, reason=refusal.reason)
        for sequence_id in closed:
            _log.debug("sequence closed", sequence_id=sequence_id)
        return codec.update_result(result)

    async def ListSequences(
        self, request: pb.ListSequencesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListSequencesResponse:
        sequences, token = self._kv.list_sequences(request.page_size, request.page_token)
        return codec.sequence_page(sequences, token)

    async def WatchPoolEvents(
        self, request: pb.WatchPoolEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchPoolEventsResponse]:
        async with aclosing(self.event_streams.watch(request)) as messages:
            async for message in messages:
                yield message

    async def GetStats(
        self, request: pb.GetStatsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetStatsResponse:
        return codec.stats(self._kv.stats())
