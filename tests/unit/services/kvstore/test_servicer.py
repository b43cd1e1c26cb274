"""KvCacheService on the wire: every call, and what its errors carry."""

from __future__ import annotations

import grpc
import pytest
from quire.common.v1 import common_pb2
from quire.kvstore.v1 import kvstore_pb2 as pb
from quire.kvstore.v1 import kvstore_pb2_grpc

from kvstore.attachment import ManagerOptions
from kvstore.fakes import FakeStorage
from kvstore.manager import PageManager
from services.common import pool_stats
from services.common.errors import error_details
from tests import kvstore_server

SHAPE = common_pb2.KvShape(
    layer_count=2, kv_head_count=1, head_size=8, dtype=common_pb2.DTYPE_BFLOAT16
)
BLOCK_BYTES = 8 * 2 * 2 * 8 * 2
SPACE = common_pb2.Namespace(model_fingerprint=b"m" * 32, tenant="t")


@pytest.fixture
async def manager():
    manager = PageManager(ManagerOptions(6 * BLOCK_BYTES, 8), FakeStorage())
    yield manager
    assert manager.audit() == []


@pytest.fixture
async def stub(manager, tmp_path):
    server = await kvstore_server.started(manager, tmp_path)
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield kvstore_pb2_grpc.KvCacheServiceStub(channel)
    await server.stop(0)


@pytest.fixture
async def attached(stub):
    await stub.AttachPool(pb.AttachPoolRequest(shape=SHAPE))
    return stub


def plan(sequence_id: str, length: int, first: int = 0) -> pb.OpenPlan:
    return pb.OpenPlan(
        sequence_id=sequence_id, token_ids=range(first, first + length), namespace=SPACE
    )


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    status = error_details(caught.value)
    return status.code.name, status.reason, status.metadata


async def test_the_pool_is_described_the_same_to_all(stub):
    assert await refusal(stub.GetPool(pb.GetPoolRequest())) == (
        "FAILED_PRECONDITION",
        "POOL_NOT_ATTACHED",
        {},
    )
    handle = (await stub.AttachPool(pb.AttachPoolRequest(shape=SHAPE))).handle
    assert handle.name == handle.posix.name == "quire-none"
    assert handle.offset_bytes == 4096
    assert handle.size_bytes == 6 * BLOCK_BYTES
    assert handle.layout == common_pb2.PoolLayout(shape=SHAPE, block_size=8, block_count=6)
    assert handle.generation != 0
    assert (await stub.GetPool(pb.GetPoolRequest())).handle == handle
    assert (await stub.AttachPool(pb.AttachPoolRequest(shape=SHAPE))).handle == handle


async def test_another_or_an_unknown_type_of_elements_is_refused(attached):
    other, none = common_pb2.KvShape(), common_pb2.KvShape()
    other.CopyFrom(SHAPE)
    other.dtype = common_pb2.DTYPE_FLOAT32
    none.CopyFrom(SHAPE)
    none.dtype = common_pb2.DTYPE_UNSPECIFIED
    code, reason, _ = await refusal(attached.AttachPool(pb.AttachPoolRequest(shape=other)))
    assert (code, reason) == ("FAILED_PRECONDITION", "LAYOUT_MISMATCH")
    code, reason, metadata = await refusal(attached.AttachPool(pb.AttachPoolRequest(shape=none)))
    assert (code, reason, metadata["field"]) == (
        "INVALID_ARGUMENT",
        "INVALID_REQUEST",
        "shape.dtype",
    )


async def test_a_sequence_lives_through_single_calls(attached, manager):
    request = pb.OpenSequencesRequest(plans=[plan("a", 12), plan("b", 3, 100)])
    a, b = (await attached.OpenSequences(request)).sequences
    assert (a.sequence_id, len(a.block_ids), a.cached_token_count) == ("a", 2, 0)
    assert (b.sequence_id, len(b.block_ids)) == ("b", 1)
    extended = await attached.ExtendSequences(
        pb.ExtendSequencesRequest(plans=[pb.ExtendPlan(sequence_id="a", length=17)])
    )
    (more,) = extended.sequences
    assert (more.sequence_id, more.first_index, len(more.block_ids)) == ("a", 2, 1)
    await attached.CommitBlocks(
        pb.CommitBlocksRequest(
            plans=[
                pb.CommitPlan(
                    sequence_id="a",
                    computed_token_count=16,
                    token_start=12,
                    token_ids=range(12, 17),
                )
            ]
        )
    )
    await attached.CloseSequences(pb.CloseSequencesRequest(sequence_ids=["a"]))
    (again,) = (await attached.OpenSequences(open_one("c", 17))).sequences
    assert again.cached_token_count == 16
    listed = await attached.ListSequences(pb.ListSequencesRequest(page_size=1))
    assert [(s.sequence_id, s.length, s.computed_token_count) for s in listed.sequences] == [
        ("b", 3, 0)
    ]
    rest = await attached.ListSequences(
        pb.ListSequencesRequest(page_size=1, page_token=listed.next_page_token)
    )
    assert [s.sequence_id for s in rest.sequences] == ["c"]
    assert list(rest.sequences[0].block_ids) == list(again.block_ids)
    assert rest.next_page_token == ""


async def test_statistics_name_every_counter(attached, manager):
    await attached.OpenSequences(pb.OpenSequencesRequest(plans=[plan("a", 12)]))
    stats = await attached.GetStats(pb.GetStatsRequest())
    assert pool_stats.from_message(stats) == manager.stats()
    assert (stats.free_block_count, stats.held_block_count, stats.waste_slot_count) == (4, 2, 4)


def extend(sequence_id: str, length: int) -> pb.ExtendSequencesRequest:
    return pb.ExtendSequencesRequest(plans=[pb.ExtendPlan(sequence_id=sequence_id, length=length)])


def open_one(*arguments) -> pb.OpenSequencesRequest:
    return pb.OpenSequencesRequest(plans=[plan(*arguments)])


TOO_MANY = pb.ListSequencesRequest(page_size=1001)
BEYOND = pb.CommitPlan(sequence_id="a", computed_token_count=9)

REFUSED = [
    ("OpenSequences", open_one("a", 9), "ALREADY_EXISTS", "SEQUENCE_EXISTS"),
    ("OpenSequences", open_one("", 9), "INVALID_ARGUMENT", "INVALID_REQUEST"),
    ("OpenSequences", open_one("b", 49), "INVALID_ARGUMENT", "PROMPT_EXCEEDS_POOL"),
    ("OpenSequences", open_one("b", 48, 100), "RESOURCE_EXHAUSTED", "OUT_OF_BLOCKS"),
    ("ExtendSequences", extend("x", 1), "NOT_FOUND", "SEQUENCE_NOT_FOUND"),
    ("ExtendSequences", extend("a", 2**31 - 1), "RESOURCE_EXHAUSTED", "OUT_OF_BLOCKS"),
    ("CommitBlocks", pb.CommitBlocksRequest(plans=[BEYOND]), "INVALID_ARGUMENT", "INVALID_COMMIT"),
    ("ListSequences", TOO_MANY, "INVALID_ARGUMENT", "INVALID_REQUEST"),
]


async def test_a_fork_shares_all_and_its_first_write_is_to_a_copy(attached, manager):
    (a,) = (await attached.OpenSequences(open_one("a", 12))).sequences
    (b,) = (await attached.ForkSequences(fork("a", "b"))).sequences
    assert (b.sequence_id, b.length, b.computed_token_count) == ("b", 12, 0)
    assert b.block_ids == a.block_ids
    assert manager.stats().num_held == 2
    (copied,) = (await attached.ExtendSequences(extend("b", 13))).sequences
    assert copied.first_index == 1
    assert copied.copied_from_block_id == a.block_ids[1]
    assert not (await attached.ExtendSequences(extend("a", 13))).sequences  # the sole owner
    cut = pb.TruncatePlan(sequence_id="b", length=8)
    await attached.TruncateSequences(pb.TruncateSequencesRequest(plans=[cut]))
    assert manager.stats().num_held == 2
    (grown,) = (await attached.ExtendSequences(extend("b", 9))).sequences
    assert not grown.HasField("copied_from_block_id")


def fork(source_id: str, sequence_id: str) -> pb.ForkSequencesRequest:
    plan = pb.ForkPlan(source_sequence_id=source_id, sequence_id=sequence_id)
    return pb.ForkSequencesRequest(plans=[plan])


def truncate(sequence_id: str, length: int) -> pb.TruncateSequencesRequest:
    plan = pb.TruncatePlan(sequence_id=sequence_id, length=length)
    return pb.TruncateSequencesRequest(plans=[plan])


REFUSED += [
    ("ForkSequences", fork("x", "b"), "NOT_FOUND", "SEQUENCE_NOT_FOUND"),
    ("ForkSequences", fork("a", "a"), "ALREADY_EXISTS", "SEQUENCE_EXISTS"),
    ("ForkSequences", fork("a", ""), "INVALID_ARGUMENT", "INVALID_REQUEST"),
    ("TruncateSequences", truncate("x", 1), "NOT_FOUND", "SEQUENCE_NOT_FOUND"),
    ("TruncateSequences", truncate("a", 0), "INVALID_ARGUMENT", "INVALID_REQUEST"),
    ("TruncateSequences", truncate("a", 9), "INVALID_ARGUMENT", "INVALID_REQUEST"),
]


@pytest.mark.parametrize(("method", "message", "code", "reason"), REFUSED)
async def test_a_refused_call_has_its_reason_and_changes_nothing(
    attached, manager, method, message, code, reason
):
    await attached.OpenSequences(pb.OpenSequencesRequest(plans=[plan("a", 8)]))
    before = manager.stats(), manager.list_sequences()
    assert (await refusal(getattr(attached, method)(message)))[:2] == (code, reason)
    assert (manager.stats(), manager.list_sequences()) == before
