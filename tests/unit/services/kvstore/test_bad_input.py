"""What a kvstore refuses: the code, the reason, and that the pool is as it was."""

from __future__ import annotations

import grpc
import pytest
from quire.kvstore.v1 import kvstore_pb2 as pb
from quire.kvstore.v1 import kvstore_pb2_grpc

from kvstore.attachment import ManagerOptions
from kvstore.fakes import FakeStorage
from kvstore.manager import PageManager
from kvstore.sequences import MAX_BATCH
from services.common.errors import error_details
from tests import kvstore_server
from tests.unit.services.kvstore.refusals import (
    BLOCK_BYTES,
    INVALID,
    LONG,
    MOST,
    NEW,
    NO_CHANGE,
    NUM_BLOCKS,
    OLD,
    OTHER,
    REFUSED,
    SHAPE,
    commits,
    fork,
    opening,
    pin,
    plan,
    resumption,
    suspension,
)


@pytest.fixture
async def stub(tmp_path):
    """A pool with a client's sequences, a driver's, suspended ones and a pin."""
    options = ManagerOptions(NUM_BLOCKS * BLOCK_BYTES, 8, pin_share=0.25)
    manager = PageManager(options, FakeStorage(), clock=lambda: 0.0)
    server = await kvstore_server.started(manager, tmp_path)
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = kvstore_pb2_grpc.KvCacheServiceStub(channel)
        await stub.AttachPool(pb.AttachPoolRequest(shape=SHAPE))
        acquire = pb.AcquireDriverLeaseRequest()
        stub.epochs = {OLD: (await stub.AcquireDriverLease(acquire)).epoch}
        stub.epochs[NEW] = (await stub.AcquireDriverLease(acquire)).epoch
        await stub.OpenSequences(opening("mine", 12))
        await stub.CommitBlocks(commits(pb.CommitPlan(sequence_id="mine", computed_token_count=9)))
        await stub.OpenSequences(opening("away", 9, 100))
        await stub.SuspendSequences(suspension("away"))
        await stub.OpenSequences(opening("driven", 9, 200, driver_epoch=stub.epochs[NEW]))
        await stub.PinPrefix(pin("p"))
        yield stub
    await server.stop(0)
    assert manager.audit() == []


async def pool(stub):
    """All that can be seen of it."""
    request = pb.ListSequencesRequest(page_size=1000, include_tokens=True)
    assert not (await stub.AuditPool(pb.AuditPoolRequest())).findings
    stats = await stub.GetStats(pb.GetStatsRequest())
    stats.audit_count = 0
    return (
        stats,
        await stub.ListSequences(request),
        await stub.ListPins(pb.ListPinsRequest()),
        await stub.GetPool(pb.GetPoolRequest()),
    )


def with_epoch(stub, message):
    """The message with the epochs that this service has given."""
    copy = type(message)()
    copy.CopyFrom(message)
    if getattr(copy, "driver_epoch", 0) in stub.epochs:
        copy.driver_epoch = stub.epochs[copy.driver_epoch]
    return copy


@pytest.mark.parametrize(("method", "message", "status"), REFUSED.values(), ids=REFUSED)
async def test_a_refused_call_says_why_and_changes_nothing(stub, method, message, status):
    before = await pool(stub)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(stub, method)(with_epoch(stub, message))
    details = error_details(caught.value)
    assert (details.code.name, details.reason) == status
    if status == INVALID:
        assert details.metadata["field"]
    assert await pool(stub) == before


@pytest.mark.parametrize(("method", "message"), NO_CHANGE.values(), ids=NO_CHANGE)
async def test_a_call_without_anything_new_to_say_changes_nothing(stub, method, message):
    before = await pool(stub)
    await getattr(stub, method)(with_epoch(stub, message))
    assert await pool(stub) == before


@pytest.mark.parametrize("method", ["ForkSequences", "SuspendSequences", "ResumeSequences"])
async def test_a_replay_of_what_cannot_be_repeated_is_refused(stub, method):
    messages = {
        "ForkSequences": fork("mine", "s"),
        "SuspendSequences": suspension("mine"),
        "ResumeSequences": resumption("away"),
    }
    await getattr(stub, method)(messages[method])
    before = await pool(stub)
    with pytest.raises(grpc.aio.AioRpcError):
        await getattr(stub, method)(messages[method])
    assert await pool(stub) == before


async def test_refused_entries_of_an_update_change_nothing(stub):
    before = await pool(stub)
    answer = await stub.UpdateSequences(
        pb.UpdateSequencesRequest(
            commits=[pb.CommitPlan(sequence_id="away", computed_token_count=9)],
            closes=["driven"],
            extends=[pb.ExtendPlan(sequence_id="mine", length=MOST)],
            opens=[plan(LONG, 9), plan("s", 65), plan("mine", 12, namespace=OTHER)],
        )
    )
    assert [refusal.reason for refusal in answer.refused] == [
        "SEQUENCE_SUSPENDED",
        "FOREIGN_SEQUENCE",
        "OUT_OF_BLOCKS",
        "INVALID_REQUEST",
        "PROMPT_EXCEEDS_POOL",
        "SEQUENCE_EXISTS",
    ]
    assert await pool(stub) == before


async def test_a_list_of_the_largest_size_is_taken(stub):
    before = await pool(stub)
    await stub.ExtendSequences(
        pb.ExtendSequencesRequest(plans=[pb.ExtendPlan(sequence_id="mine", length=1)] * MAX_BATCH)
    )
    assert await pool(stub) == before
