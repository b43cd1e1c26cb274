"""The gateway's page manager: behind gRPC, or an object in this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import starmap
from typing import Any

import grpc
from quire.kvstore.v1 import kvstore_pb2 as pb
from quire.kvstore.v1 import kvstore_pb2_grpc

from gateway import ports
from gateway.errors import PinRefused, WorkerUnavailable
from kvstore import types as kv
from kvstore.errors import (
    InvalidRequest,
    KvStoreError,
    OutOfBlocks,
    PinBudgetExceeded,
    PinExists,
    QuotaExceeded,
)
from kvstore.manager import PageManager
from services.common import pool_stats
from services.common.errors import error_details
from services.common.server import CHANNEL_OPTIONS
from services.gateway import kvstore_messages as messages
from services.gateway.unavailable import unavailable
from services.gateway.update_stream import UpdateStream

# The page manager answers in milliseconds; one that takes longer than this is stuck.
_CALL_SECONDS = 10.0

# What a pin can be refused for; anything else is about the kvstore and not about the pin.
_PIN_REFUSALS = (OutOfBlocks, QuotaExceeded, PinBudgetExceeded, PinExists, InvalidRequest)
_PIN_REASONS = frozenset(error.reason for error in _PIN_REFUSALS)


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
        first, *others = list(messages.batches(update.opens)) or [[]]
        result = await self._send_update(update, first)
        spare = ports.Update(num_spare_blocks=update.num_spare_blocks)
        for batch in others:
            waiting, refused = _held_back(result, update, batch)
            result.refused.extend(refused)
            if waiting:
                result = _joined(result, await self._send_update(spare, waiting))
        return result

    async def pin_prefix(self, plan: ports.PinPlan) -> None:
        """The pin is nobody's lease's: it outlasts one that is taken again."""
        try:
            await self._stub.PinPrefix(messages.pin_request(plan), timeout=_CALL_SECONDS)
        except grpc.RpcError as error:
            details = error_details(error)
            if details.reason in _PIN_REASONS:
                raise PinRefused(details.message, pin_id=plan.pin_id) from None
            raise unavailable("kvstore", error) from None

    async def unpin(self, pin_id: str) -> None:
        await _call(self._stub.UnpinPrefix, pb.UnpinPrefixRequest(pin_id=pin_id))

    async def get_stats(self) -> kv.PoolStats:
        """The pool's counters. Raises WorkerUnavailable."""
        response = await _call(self._stub.GetStats, pb.GetStatsRequest())
        return pool_stats.from_message(response)

    async def close(self) -> None:
        self._updates.close()
        await self._channel.close()

    async def _send_update(
        self, update: ports.Update, opens: Sequence[ports.OpenPlan]
    ) -> ports.UpdateResult:
        request = messages.update(update, opens)
        request.driver_epoch = self._epoch
        return messages.update_result(await self._updates.send(request))


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
        return _from_kvstore(result)

    async def pin_prefix(self, plan: ports.PinPlan) -> None:
        """The pin is nobody's lease's: it outlasts one that is taken again."""
        namespace = kv.Namespace(*plan.namespace)
        pin = kv.PinPlan(plan.pin_id, plan.owner, plan.ttl_seconds, namespace, plan.token_ids)
        try:
            self._manager.pin_prefix(pin)
        except _PIN_REFUSALS as error:
            raise PinRefused(str(error), pin_id=plan.pin_id) from None
        except KvStoreError as error:
            raise WorkerUnavailable(f"kvstore: {error}") from None

    async def unpin(self, pin_id: str) -> None:
        try:
            self._manager.unpin(pin_id=pin_id)
        except KvStoreError as error:
            raise WorkerUnavailable(f"kvstore: {error}") from None

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


# --- an update in several messages --------------------------------------------


def _held_back(
    result: ports.UpdateResult, update: ports.Update, batch: Sequence[ports.OpenPlan]
) -> tuple[list[ports.OpenPlan], list[ports.Refusal]]:
    """Plans that may still be opened, and refusals of those that would overtake others."""
    tenants = {plan.sequence_id: plan.namespace.tenant for plan in update.opens}
    queued = {*tenants, *update.resumes}
    obstacles: dict[str | None, ports.Refusal] = {}  # of a tenant; None: of all
    for refusal in result.refused:
        if refusal.sequence_id in queued and refusal.reason == OutOfBlocks.reason:
            obstacles.setdefault(None, refusal)
        elif refusal.sequence_id in tenants and refusal.reason == QuotaExceeded.reason:
            obstacles.setdefault(tenants[refusal.sequence_id], refusal)
    waiting, refused = [], []
    for plan in batch:
        obstacle = obstacles.get(None) or obstacles.get(plan.namespace.tenant)
        if obstacle is None:
            waiting.append(plan)
        else:
            refused.append(ports.Refusal(plan.sequence_id, obstacle.reason, obstacle.message))
    return waiting, refused


def _joined(result: ports.UpdateResult, more: ports.UpdateResult) -> ports.UpdateResult:
    """The answer with that to further openings.

    Copies to the host pool may all come first: what is evicted for the later openings is
    no target of the earlier copies.
    """
    return replace(
        result,
        opened=result.opened + more.opened,
        refused=result.refused + more.refused,
        copies=result.copies + more.copies,
        transfer=max(result.transfer, more.transfer),
        num_available_blocks=more.num_available_blocks,
    )


# --- in this process ------------------------------------------------------------


def _to_kvstore(update: ports.Update) -> kv.Update:
    return kv.Update(
        commits=list(starmap(kv.CommitPlan, update.commits)),
        forks=[
            kv.ForkPlan(source_id, sequence_id, length)
            for sequence_id, source_id, length in update.forks
        ],
        closes=update.closes,
        truncates=list(starmap(kv.TruncatePlan, update.truncates)),
        suspends=list(map(kv.SuspendPlan, update.suspends)),
        extends=list(starmap(kv.ExtendPlan, update.extends)),
        resumes=update.resumes,
        opens=[
            kv.OpenPlan(
                p.sequence_id,
                p.token_ids,
                kv.Namespace(*p.namespace),
                group=p.group_id,
                is_resumption=p.is_resumption,
            )
            for p in update.opens
        ],
        num_spare_blocks=update.num_spare_blocks,
        runs_copies=True,
        completed_transfer=update.completed_transfer,
        transfer_seconds=update.copy_seconds,
        num_prefill_tokens=update.num_prefill_tokens,
        prefill_seconds=update.prefill_seconds,
    )


def _from_kvstore(result: kv.UpdateResult) -> ports.UpdateResult:
    return ports.UpdateResult(
        extended=[
            ports.ExtendedSequence(e.sequence_id, e.first_index, e.block_ids, _replaced(e))
            for e in result.extended
        ],
        opened=[
            ports.OpenedSequence(o.sequence_id, o.block_ids, o.num_cached_tokens, _copies(o.copies))
            for o in result.opened
        ],
        refused=[ports.Refusal(r.sequence_id, r.reason, r.message) for r in result.refused],
        copies=_copies(result.copies),
        transfer=result.transfer,
        forked=[
            ports.ForkedSequence(f.sequence_id, f.block_ids, f.num_computed_tokens)
            for f in result.forked
        ],
        suspended=[
            ports.SuspendedSequence(
                s.sequence_id, s.num_freed_blocks, s.mode is kv.SuspendMode.SWAP
            )
            for s in result.suspended
        ],
        resumed=[
            ports.ResumedSequence(
                r.sequence_id, r.block_ids, r.num_computed_tokens, _copies(r.copies)
            )
            for r in result.resumed
        ],
        num_available_blocks=result.num_available_blocks,
    )


def _copies(copies: Iterable[kv.BlockCopy]) -> list[ports.BlockCopy]:
    return list(starmap(ports.BlockCopy, copies))


def _replaced(extended: kv.ExtendedSequence) -> Sequence[ports.BlockCopy]:
    if extended.copied_from is None:
        return ()
    return [ports.BlockCopy(extended.copied_from, extended.block_ids[0])]
