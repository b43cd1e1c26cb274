"""KvCacheService over the page manager: decode, call, encode."""

# Names and signatures are those of the generated base class.
# ruff: noqa: ARG002, N802

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing

import grpc
import structlog
from quire.kvstore.v1 import kvstore_pb2 as pb
from quire.kvstore.v1 import kvstore_pb2_grpc

from kvstore.manager import PageManager
from kvstore.types import SuspendedSequence
from services.common import pool_stats
from services.common.durations import seconds_of
from services.kvstore import codec, pin_codec, swap_codec, update_codec
from services.kvstore.event_stream import EventStreams

_log = structlog.get_logger()


def _log_suspended(sequences: Iterable[SuspendedSequence]) -> None:
    for one in sequences:
        _log.info(
            "sequence suspended",
            sequence_id=one.sequence_id,
            mode=one.mode.value,
            reason=one.reason,
            num_freed_blocks=one.num_freed_blocks,
        )


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
        return pb.AttachPoolResponse(
            handle=codec.pool_handle(handle),
            host_handle=codec.optional_pool_handle(self._kv.get_host_pool()),
        )

    async def GetPool(
        self, request: pb.GetPoolRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetPoolResponse:
        return pb.GetPoolResponse(
            handle=codec.pool_handle(self._kv.get_pool()),
            host_handle=codec.optional_pool_handle(self._kv.get_host_pool()),
        )

    async def OpenSequences(
        self, request: pb.OpenSequencesRequest, context: grpc.aio.ServicerContext
    ) -> pb.OpenSequencesResponse:
        plans = [codec.open_plan(plan) for plan in request.plans]
        opened = self._kv.open_sequences(plans, request.driver_epoch)
        return pb.OpenSequencesResponse(sequences=codec.opened(opened))

    async def ForkSequences(
        self, request: pb.ForkSequencesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ForkSequencesResponse:
        plans = [codec.fork_plan(plan) for plan in request.plans]
        forked = self._kv.fork_sequences(plans, request.driver_epoch)
        return pb.ForkSequencesResponse(sequences=codec.forked(forked))

    async def TruncateSequences(
        self, request: pb.TruncateSequencesRequest, context: grpc.aio.ServicerContext
    ) -> pb.TruncateSequencesResponse:
        plans = [codec.truncate_plan(plan) for plan in request.plans]
        self._kv.truncate_sequences(plans, request.driver_epoch)
        return pb.TruncateSequencesResponse()

    async def ExtendSequences(
        self, request: pb.ExtendSequencesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ExtendSequencesResponse:
        plans = [codec.extend_plan(plan) for plan in request.plans]
        extended = self._kv.extend_sequences(plans, request.driver_epoch)
        return pb.ExtendSequencesResponse(sequences=codec.extended(extended))

    async def CommitBlocks(
        self, request: pb.CommitBlocksRequest, context: grpc.aio.ServicerContext
    ) -> pb.CommitBlocksResponse:
        plans = [codec.commit_plan(plan) for plan in request.plans]
        self._kv.commit_blocks(plans, request.driver_epoch)
        return pb.CommitBlocksResponse()

    async def CloseSequences(
        self, request: pb.CloseSequencesRequest, context: grpc.aio.ServicerContext
    ) -> pb.CloseSequencesResponse:
        self._kv.close_sequences(request.sequence_ids, request.driver_epoch)
        return pb.CloseSequencesResponse()

    async def AcquireDriverLease(
        self, request: pb.AcquireDriverLeaseRequest, context: grpc.aio.ServicerContext
    ) -> pb.AcquireDriverLeaseResponse:
        epoch, num_closed = self._kv.acquire_driver_lease(adopt=request.adopts)
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
        return self._update(request)

    async def DriveSequences(
        self,
        request_iterator: AsyncIterator[pb.DriveSequencesRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[pb.DriveSequencesResponse]:
        async for request in request_iterator:
            yield pb.DriveSequencesResponse(update=self._update(request.update))

    def _update(self, request: pb.UpdateSequencesRequest) -> pb.UpdateSequencesResponse:
        closed = [sequence_id for sequence_id in request.closes if self._kv.is_open(sequence_id)]
        request_ids = {plan.sequence_id: plan.request_id for plan in request.opens}
        result = self._kv.update(update_codec.update(request), request.driver_epoch)
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
        _log_suspended(result.suspended)
        for resumed in result.resumed:
            _log.info(
                "sequence resumed",
                sequence_id=resumed.sequence_id,
                num_blocks=len(resumed.block_ids),
                num_computed_tokens=resumed.num_computed_tokens,
            )
        return update_codec.update_result(result)

    async def SuspendSequences(
        self, request: pb.SuspendSequencesRequest, context: grpc.aio.ServicerContext
    ) -> pb.SuspendSequencesResponse:
        plans = [swap_codec.suspend_plan(plan) for plan in request.plans]
        answer = self._kv.suspend_sequences(
            plans, request.driver_epoch, runs_copies=request.runs_copies
        )
        _log_suspended(answer[0])
        return swap_codec.suspended(*answer)

    async def ResumeSequences(
        self, request: pb.ResumeSequencesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResumeSequencesResponse:
        answer = self._kv.resume_sequences(
            request.sequence_ids, request.driver_epoch, runs_copies=request.runs_copies
        )
        return swap_codec.resumed(*answer)

    async def PinPrefix(
        self, request: pb.PinPrefixRequest, context: grpc.aio.ServicerContext
    ) -> pb.PinPrefixResponse:
        pin = self._kv.pin_prefix(pin_codec.pin_plan(request), request.driver_epoch)
        return pb.PinPrefixResponse(pin=pin_codec.pin_info(pin))

    async def RenewPin(
        self, request: pb.RenewPinRequest, context: grpc.aio.ServicerContext
    ) -> pb.RenewPinResponse:
        pin = self._kv.renew_pin(request.pin_id, seconds_of(request.ttl))
        return pb.RenewPinResponse(pin=pin_codec.pin_info(pin))

    async def UnpinPrefix(
        self, request: pb.UnpinPrefixRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnpinPrefixResponse:
        num_ended = self._kv.unpin(pin_id=request.pin_id, owner=request.owner)
        return pb.UnpinPrefixResponse(ended_pin_count=num_ended)

    async def ListPins(
        self, request: pb.ListPinsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListPinsResponse:
        return pb.ListPinsResponse(pins=map(pin_codec.pin_info, self._kv.list_pins()))

    async def AuditPool(
        self, request: pb.AuditPoolRequest, context: grpc.aio.ServicerContext
    ) -> pb.AuditPoolResponse:
        findings = self._kv.audit(repair=request.repair)
        for finding in findings:
            _log.error("audit", kind=finding.kind, finding=finding.text)
        remaining = self._kv.audit() if findings and request.repair else []
        return pb.AuditPoolResponse(
            findings=map(codec.audit_finding, findings),
            remaining_findings=map(codec.audit_finding, remaining),
        )

    async def ListSequences(
        self, request: pb.ListSequencesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListSequencesResponse:
        sequences, token = self._kv.list_sequences(
            request.page_size, request.page_token, with_tokens=request.include_tokens
        )
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
        return pool_stats.to_message(self._kv.stats())
