"""The gateway's page manager: behind gRPC, or an object in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grpc
from quire.common.v1 import common_pb2
from quire.kvstore.v1 import kvstore_pb2 as pb
from quire.kvstore.v1 import kvstore_pb2_grpc

from gateway import ports
from gateway.errors import WorkerUnavailable
from kvstore import types as kv
from kvstore.errors import KvStoreError, OutOfBlocks, QuotaExceeded
from kvstore.manager import PageManager
from services.common import pool_stats
from services.common.durations import duration
from services.common.server import CHANNEL_OPTIONS
from services.gateway.unavailable import unavailable
from services.gateway.update_stream import UpdateStream

# The page manager answers in milliseconds; one that takes longer than this is stuck.
_CALL_SECONDS = 10.0

# Prompt tokens in one message: at most 5 bytes each, and well below 4 MiB in all.
_MAX_PROMPT_TOKENS = 400_000


class GrpcKvStore:
    """gateway.ports.KvStore over a kvstore process."""

    def __init__(self, target: str) -> None:
        """`target` is HOST:PORT or unix:PATH. Connects when first used."""
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._stub = kvstore_pb2_grpc.KvCacheServiceStub(self._channel)
        self._updates = UpdateStream(self._stub, _CALL_SECONDS)
        self._epoch = 0

    async def become_driver(self, driver_id: str) -> None:
        request = pb.AcquireDriverLeaseRequest(driver_id=driver_id)
        self._epoch = (await _call(self._stub.AcquireDriverLease, request)).epoch

    async def resign(self) -> None:
        request = pb.ReleaseDriverLeaseRequest(epoch=self._epoch)
        await _call(self._stub.ReleaseDriverLease, request)

    async def update_sequences(self, update: ports.Update) -> ports.UpdateResult:
        result = ports.UpdateResult(extended=[], opened=[], refused=[])
        batches = list(_batches(update.opens))
        request = _update(update, batches[0] if batches else ())
        result = _add(result, await self._send_update(request))
        for batch in batches[1:]:
            full = next((r for r in result.refused if _stops_opens(r, update)), None)
            if full is not None:
                result.refused.extend(
                    ports.Refusal(plan.sequence_id, full.reason, full.message) for plan in batch
                )
                continue
            result = _add(result, await self._send_update(_update(ports.Update(), batch)))
        return result

    async def get_stats(self) -> kv.PoolStats:
        """The pool's counters. Raises WorkerUnavailable."""
        response = await _call(self._stub.GetStats, pb.GetStatsRequest())
        return pool_stats.from_message(response)

    async def close(self) -> None:
        self._updates.close()
        await self._channel.close()

    async def _send_update(self, request: pb.UpdateSequencesRequest) -> pb.UpdateSequencesResponse:
        request.driver_epoch = self._epoch
        return await self._updates.send(request)


class LocalKvStore:
    """gateway.ports.KvStore over a page manager in this process, which it does not own."""

    def __init__(self, manager: PageManager) -> None:
        self._manager = manager
        self._epoch = 0

    async def become_driver(self, driver_id: str) -> None:  # noqa: ARG002 - for a log
        self._epoch, _ = self._manager.acquire_driver_lease()

    async def resign(self) -> None:
        self._manager.release_driver_lease(self._epoch)

    async def update_sequences(self, update: ports.Update) -> ports.UpdateResult:
        try:
            result = self._manager.update(_to_kvstore(update), self._epoch)
        except KvStoreError as error:
            raise WorkerUnavailable(f"kvstore: {error}") from None
        return ports.UpdateResult(
            extended=[
                ports.ExtendedSequence(e.sequence_id, e.first_index, e.block_ids)
                for e in result.extended
            ],
            opened=[
                ports.OpenedSequence(
                    o.sequence_id,
                    o.block_ids,
                    o.num_cached_tokens,
                    [ports.BlockCopy(*copy) for copy in o.copies],
                )
                for o in result.opened
            ],
            refused=[ports.Refusal(r.sequence_id, r.reason, r.message) for r in result.refused],
            copies=[ports.BlockCopy(*copy) for copy in result.copies],
            transfer=result.transfer,
        )

    async def get_stats(self) -> kv.PoolStats:
        """The pool's counters."""
        return self._manager.stats()

    async def close(self) -> None:
        """Nothing to give up."""


async def _call(method: Any, request: Any) -> Any:
    """Call the kvstore. Raises WorkerUnavailable if it is out of reach or refuses."""
    try:
        return await method(request, timeout=_CALL_SECONDS)
    except grpc.RpcError as error:
        raise unavailable("kvstore", error) from None


def _batches(opens: Sequence[ports.OpenPlan]) -> Iterator[list[ports.OpenPlan]]:
    """The plans in order, in groups that fit a message."""
    batch: list[ports.OpenPlan] = []
    num_tokens = 0
    for plan in opens:
        if batch and num_tokens + len(plan.token_ids) > _MAX_PROMPT_TOKENS:
            yield batch
            batch, num_tokens = [], 0
        batch.append(plan)
        num_tokens += len(plan.token_ids)
    if batch:
        yield batch


def _stops_opens(refusal: ports.Refusal, update: ports.Update) -> bool:
    """An open that found no room: those behind it must not overtake it."""
    return refusal.reason in (OutOfBlocks.reason, QuotaExceeded.reason) and any(
        plan.sequence_id == refusal.sequence_id for plan in update.opens
    )


def _update(update: ports.Update, opens: Sequence[ports.OpenPlan]) -> pb.UpdateSequencesRequest:
    return pb.UpdateSequencesRequest(
        commits=[
            pb.CommitPlan(
                sequence_id=plan.sequence_id,
                computed_token_count=plan.num_computed_tokens,
                token_start=plan.token_start,
                token_ids=plan.token_ids,
            )
            for plan in update.commits
        ],
        closes=update.closes,
        extends=[
            pb.ExtendPlan(sequence_id=plan.sequence_id, length=plan.length)
            for plan in update.extends
        ],
        opens=[
            pb.OpenPlan(
                sequence_id=plan.sequence_id,
                token_ids=plan.token_ids,
                namespace=common_pb2.Namespace(**plan.namespace._asdict()),
                request_id=plan.request_id,
                is_resumption=plan.is_resumption,
            )
            for plan in opens
        ],
        runs_copies=True,
        completed_transfer=update.completed_transfer,
        transfer_duration=duration(update.copy_seconds),
        prefill_token_count=update.num_prefill_tokens,
        prefill_duration=duration(update.prefill_seconds),
    )


def _add(result: ports.UpdateResult, response: pb.UpdateSequencesResponse) -> ports.UpdateResult:
    result.extended.extend(
        ports.ExtendedSequence(e.sequence_id, e.first_index, list(e.block_ids))
        for e in response.extended
    )
    result.opened.extend(
        ports.OpenedSequence(
            o.sequence_id, list(o.block_ids), o.cached_token_count, _copies(o.copies)
        )
        for o in response.opened
    )
    result.copies.extend(_copies(response.copies))
    result.refused.extend(
        ports.Refusal(r.sequence_id, r.reason, r.message) for r in response.refused
    )
    return dataclasses.replace(result, transfer=max(result.transfer, response.transfer))


def _copies(messages: Iterable[pb.BlockCopy]) -> list[ports.BlockCopy]:
    return [ports.BlockCopy(c.source_block_id, c.target_block_id) for c in messages]


def _to_kvstore(update: ports.Update) -> kv.Update:
    return kv.Update(
        commits=[
            kv.CommitPlan(p.sequence_id, p.num_computed_tokens, p.token_start, p.token_ids)
            for p in update.commits
        ],
        closes=update.closes,
        extends=[kv.ExtendPlan(p.sequence_id, p.length) for p in update.extends],
        opens=[
            kv.OpenPlan(
                p.sequence_id,
                p.token_ids,
                kv.Namespace(*p.namespace),
                is_resumption=p.is_resumption,
            )
            for p in update.opens
        ],
        runs_copies=True,
        completed_transfer=update.completed_transfer,
        transfer_seconds=update.copy_seconds,
        num_prefill_tokens=update.num_prefill_tokens,
        prefill_seconds=update.prefill_seconds,
    )
