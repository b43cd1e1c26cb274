"""WatchPoolEvents on the wire: snapshots, numbers, slow clients and ends."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from quire.kvstore.v1 import kvstore_pb2 as pb
from quire.kvstore.v1 import kvstore_pb2_grpc

from kvstore.attachment import ManagerOptions
from kvstore.content_keys import prefix_keys, split_keys
from kvstore.errors import EventsTooOld, TooManyWatchers
from kvstore.fakes import FakeStorage
from kvstore.manager import PageManager
from kvstore.types import CommitPlan, ExtendPlan, KvShape, Namespace, OpenPlan
from services.common.errors import error_details
from services.common.server import MAX_MESSAGE_BYTES, GrpcServer
from services.kvstore import event_codec
from services.kvstore.event_stream import EventStreams
from services.kvstore.servicer import KvCacheServicer

SHAPE = KvShape(num_layers=1, num_kv_heads=1, head_size=8, dtype="bfloat16")
SPACE = Namespace(b"m" * 32, tenant="t")
WATCH = pb.WatchPoolEventsRequest


def make_manager(num_blocks: int, block_size: int = 8) -> PageManager:
    options = ManagerOptions(num_blocks * block_size * SHAPE.token_bytes, block_size)
    manager = PageManager(options, FakeStorage())
    manager.attach_pool(SHAPE)
    return manager


@pytest.fixture
def manager():
    manager = make_manager(16)
    yield manager
    assert manager.audit() == []


@pytest.fixture
def servicer(manager):
    return KvCacheServicer(manager)


@pytest.fixture
async def server(servicer, tmp_path):
    server = GrpcServer(
        f"unix:{tmp_path / 'kv.sock'}",
        [],
        lambda s: kvstore_pb2_grpc.add_KvCacheServiceServicer_to_server(servicer, s),
    )
    await server.start()
    yield server
    await server.stop(0)


@pytest.fixture
async def stub(server):
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield kvstore_pb2_grpc.KvCacheServiceStub(channel)


def run(manager, sequence_id: str, length: int, first: int = 0) -> list[bytes]:
    """Open a sequence, compute its prompt, close it; the keys of its full blocks."""
    tokens = range(first, first + length)
    manager.open_sequences([OpenPlan(sequence_id, tokens, SPACE)])
    manager.commit_blocks([CommitPlan(sequence_id, length)])
    manager.close_sequences([sequence_id])
    return prefix_keys(SPACE, tokens, 8)


async def take(call, count: int) -> list[pb.WatchPoolEventsResponse]:
    return [await asyncio.wait_for(call.read(), 10) for _ in range(count)]


async def _read_all(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(_read_all(call), 10)
    status = error_details(caught.value)
    return status.code.name, status.reason


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what it waits for signals nobody
            await asyncio.sleep(0.01)


async def test_a_stream_is_a_snapshot_and_then_events(stub, manager):
    old = run(manager, "a", 17)
    call = stub.WatchPoolEvents(WATCH())
    (snapshot,) = await take(call, 1)
    assert (snapshot.number, snapshot.snapshot.is_last) == (1, True)
    assert set(snapshot.snapshot.keys) == set(old)
    assert (snapshot.snapshot.block_size, list(snapshot.snapshot.token_ids)) == (8, [])
    new = run(manager, "b", 16, 100)
    run(manager, "c", 16 * 8, 1000)
    events = await take(call, 3)
    assert [event.number for event in events] == [2, 3, 4]
    assert {event.epoch for event in [snapshot, *events]} == {manager.events().epoch}
    stored, evicted, evicted_too = events
    assert list(stored.stored.keys) == new
    assert len(stored.stored.block_ids) == 2
    assert evicted.evicted.cause == pb.EVICTION_CAUSE_ROOM
    gone = [*evicted.evicted.keys, *evicted_too.evicted.keys]
    assert set(gone) == {*old, *new}
    call.cancel()


async def test_what_a_sequence_generates_is_reported_as_it_is_computed(stub, manager):
    call = stub.WatchPoolEvents(WATCH(include_token_ids=True))
    manager.open_sequences([OpenPlan("a", range(5), SPACE)])
    manager.commit_blocks([CommitPlan("a", 5)])
    manager.extend_sequences([ExtendPlan("a", 9)])
    await take(call, 1)
    manager.commit_blocks([CommitPlan("a", 8, 5, [7, 7, 7])])
    (stored,) = await take(call, 1)
    tokens = [*range(5), 7, 7, 7]
    assert list(stored.stored.keys) == prefix_keys(SPACE, tokens, 8)
    assert list(stored.stored.token_ids) == tokens
    call.cancel()


async def test_several_watchers_get_the_same_events(stub, manager):
    calls = [stub.WatchPoolEvents(WATCH()) for _ in range(3)]
    for call in calls:
        await take(call, 1)
    run(manager, "a", 17)
    run(manager, "b", 17, 100)
    seen = [[m.SerializeToString() for m in await take(call, 2)] for call in calls]
    assert seen[0] == seen[1] == seen[2]
    for call in calls:
        call.cancel()


async def test_a_watcher_goes_on_where_it_was(stub, manager):
    call = stub.WatchPoolEvents(WATCH())
    (snapshot,) = await take(call, 1)
    run(manager, "a", 17)
    (first,) = await take(call, 1)
    call.cancel()
    new = run(manager, "b", 17, 100)
    again = stub.WatchPoolEvents(WATCH(epoch=snapshot.epoch, after_number=first.number))
    (second,) = await take(again, 1)
    assert (second.number, list(second.stored.keys)) == (2, new)
    again.cancel()


async def test_another_epoch_begins_with_a_snapshot(stub, manager):
    run(manager, "a", 17)
    call = stub.WatchPoolEvents(WATCH(epoch=12345, after_number=999))
    (snapshot,) = await take(call, 1)
    assert (snapshot.number, len(snapshot.snapshot.keys)) == (1, 2)
    call.cancel()


async def test_requests_that_cannot_be_served_say_why(stub, manager):
    run(manager, "a", 17)
    run(manager, "b", 17, 100)
    epoch = manager.events().epoch
    too_old = stub.WatchPoolEvents(WATCH(epoch=epoch, after_number=1))
    assert await refusal(too_old) == ("OUT_OF_RANGE", "EVENTS_TOO_OLD")
    future = stub.WatchPoolEvents(WATCH(epoch=epoch, after_number=3))
    assert await refusal(future) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
    manager.close()
    no_pool = stub.WatchPoolEvents(WATCH())
    assert await refusal(no_pool) == ("FAILED_PRECONDITION", "POOL_NOT_ATTACHED")


async def test_a_burst_beyond_the_buffers_ends_the_stream(stub, manager):
    manager.events().capacity = 60
    call = stub.WatchPoolEvents(WATCH())
    await take(call, 1)
    for index in range(20):  # on one turn of the event loop: nobody can follow
        run(manager, f"{index}", 17, 1000 * index)
    assert await refusal(call) == ("OUT_OF_RANGE", "EVENTS_TOO_OLD")
    again = stub.WatchPoolEvents(WATCH())
    (snapshot,) = await take(again, 1)
    assert snapshot.number == manager.events().number
    again.cancel()


async def test_a_slow_watcher_falls_behind_alone(manager):
    """Streams without a wire, whose buffers would hide who is slow."""
    manager.events().capacity = 60
    streams = EventStreams(manager)
    fast, slow = streams.watch(WATCH()), streams.watch(WATCH())
    keys = set((await anext(fast)).snapshot.keys)
    await anext(slow)
    for index in range(20):
        run(manager, f"{index}", 17, 1000 * index)
        while (message := await anext(fast)).number < manager.events().number:
            keys.update(message.stored.keys)
            keys.difference_update(message.evicted.keys)
        keys.update(message.stored.keys)
    while manager.events().advance():
        pass
    assert keys == set(split_keys(manager.events().snapshot().keys.tobytes()))
    with pytest.raises(EventsTooOld):
        await anext(slow)
    await fast.aclose()
    assert streams.num_watchers == 0


async def test_a_client_that_cancels_leaves_nothing_behind(stub, servicer, manager):
    calls = [stub.WatchPoolEvents(WATCH()) for _ in range(3)]
    for call in calls:
        await take(call, 1)
    assert servicer.event_streams.num_watchers == 3
    for call in calls:
        call.cancel()
    await until(lambda: servicer.event_streams.num_watchers == 0)
    assert manager.events().wakers == set()


async def test_a_deadline_ends_a_stream(stub, servicer):
    call = stub.WatchPoolEvents(WATCH(), timeout=0.2)
    await take(call, 1)
    assert (await refusal(call))[0] == "DEADLINE_EXCEEDED"
    await until(lambda: servicer.event_streams.num_watchers == 0)


async def test_streams_end_when_the_server_stops(stub, servicer):
    call = stub.WatchPoolEvents(WATCH())
    await take(call, 1)
    servicer.event_streams.close()
    assert await take(call, 1) == [grpc.aio.EOF]
    assert await call.code() is grpc.StatusCode.OK


async def test_a_stream_ends_with_its_pool(stub, manager):
    run(manager, "a", 17)
    call = stub.WatchPoolEvents(WATCH())
    (snapshot,) = await take(call, 1)
    manager.close()
    cleared, end = await take(call, 2)
    assert (cleared.number, cleared.WhichOneof("event")) == (snapshot.number + 1, "cleared")
    assert end is grpc.aio.EOF


async def test_watchers_are_limited(manager):
    streams = EventStreams(manager)
    open_streams = [streams.watch(WATCH()) for _ in range(32)]
    for stream in open_streams:
        await anext(stream)
    with pytest.raises(TooManyWatchers) as caught:
        await anext(streams.watch(WATCH()))
    assert caught.value.metadata == {"limit": "32"}
    for stream in open_streams:
        await stream.aclose()
    assert streams.num_watchers == 0


async def test_a_large_snapshot_comes_in_parts():
    manager = make_manager(10_000, block_size=32)
    tokens = [2**31 - 1 - i for i in range(32 * 10_000)]  # the longest on the wire
    manager.open_sequences([OpenPlan("a", tokens, SPACE)])
    manager.commit_blocks([CommitPlan("a", len(tokens))])
    stream = EventStreams(manager).watch(WATCH(include_token_ids=True))
    parts = [await anext(stream)]
    while not parts[-1].snapshot.is_last:
        parts.append(await anext(stream))
    assert len(parts) > 2
    assert {(part.epoch, part.number) for part in parts} == {(manager.events().epoch, 10)}
    assert max(part.ByteSize() for part in parts) < MAX_MESSAGE_BYTES
    keys = [key for part in parts for key in part.snapshot.keys]
    assert set(keys) == set(prefix_keys(SPACE, tokens, 32))
    sent = [token for part in parts for token in part.snapshot.token_ids]
    assert sorted(sent) == sorted(tokens)
    parents = dict(zip(keys, [k for p in parts for k in p.snapshot.parent_keys], strict=True))
    assert sum(parent not in parents for parent in parents.values()) == 1
    await stream.aclose()


async def test_an_event_of_the_longest_run_fits_a_message():
    manager = make_manager(1024, block_size=32)
    stream = EventStreams(manager).watch(WATCH(include_token_ids=True))
    assert (await anext(stream)).snapshot.is_last
    tokens = [2**31 - 1 - i for i in range(32 * 1024)]
    manager.open_sequences([OpenPlan("a", tokens, SPACE)])
    manager.commit_blocks([CommitPlan("a", len(tokens))])
    stored = await anext(stream)
    assert list(stored.stored.token_ids) == tokens
    assert stored.ByteSize() < MAX_MESSAGE_BYTES
    await stream.aclose()


def test_every_cause_has_a_name_on_the_wire():
    assert set(event_codec._CAUSES.values()) == set(pb.EvictionCause.values()) - {0}
