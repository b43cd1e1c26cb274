"""Followers of a pool: gaps, restarts, and a kvstore that comes and goes. Fault P4."""

from __future__ import annotations

import asyncio

import pytest
from quire.kvstore.v1 import kvstore_pb2 as pb
from quire.kvstore.v1 import kvstore_pb2_grpc

from kvstore.attachment import ManagerOptions
from kvstore.content_keys import prefix_keys, split_keys
from kvstore.fakes import FakeStorage
from kvstore.manager import PageManager
from kvstore.types import CommitPlan, KvShape, Namespace, OpenPlan
from services.common.pool_follower import EventGap, PoolFollower, PoolView
from services.common.server import GrpcServer
from services.kvstore.servicer import KvCacheServicer

SHAPE = KvShape(num_layers=1, num_kv_heads=1, head_size=8, dtype="bfloat16")
SPACE = Namespace(b"m" * 32)


def key(name: object) -> bytes:
    return str(name).encode().rjust(32, b".")


def snapshot(epoch: int, number: int, *names: object, is_last: bool = True):
    part = pb.PoolSnapshot(keys=map(key, names), is_last=is_last)
    return pb.WatchPoolEventsResponse(epoch=epoch, number=number, snapshot=part)


def stored(epoch: int, number: int, *names: object):
    event = pb.BlocksStored(keys=map(key, names))
    return pb.WatchPoolEventsResponse(epoch=epoch, number=number, stored=event)


def evicted(epoch: int, number: int, *names: object):
    event = pb.BlocksEvicted(keys=map(key, names))
    return pb.WatchPoolEventsResponse(epoch=epoch, number=number, evicted=event)


def keys(*names: object) -> set[bytes]:
    return set(map(key, names))


@pytest.fixture
def view():
    view = PoolView()
    view.apply(snapshot(1, 0))
    return view


def test_a_dropped_event_is_noticed_and_a_snapshot_taken(view):
    """Fault P4: event 7 of 10 is lost."""
    events = [stored(1, number, number) for number in range(1, 11)]
    for event in events[:6]:
        view.apply(event)
    with pytest.raises(EventGap, match="event 8 came instead of 7"):
        view.apply(events[7])
    assert view.keys == keys(*range(1, 7))
    assert not view.is_current
    assert view.request() == pb.WatchPoolEventsRequest()
    with pytest.raises(EventGap):  # nothing is applied on top of the hole
        view.apply(events[8])
    view.apply(snapshot(1, 10, *range(1, 11)))
    assert (view.is_current, view.keys) == (True, keys(*range(1, 11)))
    assert view.request() == pb.WatchPoolEventsRequest(epoch=1, after_number=10)
    view.apply(stored(1, 11, 11))
    assert view.keys == keys(*range(1, 12))


def test_a_restart_with_numbers_from_zero_drops_the_old_entries(view):
    """Fault P4: the same name, another incarnation."""
    for number in range(1, 4):
        view.apply(stored(1, number, f"old {number}"))
    view.apply(snapshot(2, 0, is_last=False))
    assert (view.keys, view.is_current) == (set(), False)
    view.apply(snapshot(2, 0, "new"))
    assert (view.epoch, view.number, view.keys) == (2, 0, keys("new"))
    view.apply(stored(2, 1, "newer"))
    assert view.keys == keys("new", "newer")


def test_an_event_of_another_epoch_is_never_applied_whatever_its_number(view):
    view.apply(stored(1, 1, "old"))
    with pytest.raises(EventGap):
        view.apply(evicted(2, 2, "old"))
    assert (view.keys, view.is_current) == (set(), False)


def test_an_event_that_comes_twice_is_a_gap(view):
    view.apply(stored(1, 1, "a"))
    with pytest.raises(EventGap):
        view.apply(stored(1, 1, "a"))


def test_a_snapshot_counts_only_when_it_is_complete(view):
    view.apply(stored(1, 1, "a"))
    view.lose_track()
    view.apply(snapshot(1, 5, "b", is_last=False))
    assert (view.keys, view.is_current) == (keys("a"), False)
    assert view.request() == pb.WatchPoolEventsRequest()  # the stream broke: from the start
    view.apply(snapshot(1, 6, "c", is_last=False))
    with pytest.raises(EventGap):
        view.apply(stored(1, 7, "d"))
    view.request()
    view.apply(snapshot(1, 7, "c", "d"))
    assert view.keys == keys("c", "d")


def test_an_event_of_a_kind_from_the_future_asks_for_a_snapshot(view):
    with pytest.raises(EventGap, match="no known kind"):
        view.apply(pb.WatchPoolEventsResponse(epoch=1, number=1))
    assert view.request() == pb.WatchPoolEventsRequest()


def test_evicted_and_cleared_blocks_are_gone(view):
    view.apply(stored(1, 1, "a", "b", "c"))
    view.apply(evicted(1, 2, "b"))
    assert view.keys == keys("a", "c")
    assert view.count_leading([key("a"), key("b"), key("c")]) == 1
    assert view.count_leading([key("a"), key("c")]) == 2
    view.apply(pb.WatchPoolEventsResponse(epoch=1, number=3, cleared=pb.PoolCleared()))
    assert (view.keys, view.number) == (set(), 3)


# --- over gRPC ----------------------------------------------------------------


class KvStore:
    """A kvstore process, as far as its followers can tell."""

    def __init__(self, address: str) -> None:
        self.manager = PageManager(ManagerOptions(16 * 8 * SHAPE.token_bytes, 8), FakeStorage())
        self.manager.attach_pool(SHAPE)
        self.address = address

    async def start(self) -> None:
        servicer = KvCacheServicer(self.manager)
        self.server = GrpcServer(
            self.address,
            [],
            lambda s: kvstore_pb2_grpc.add_KvCacheServiceServicer_to_server(servicer, s),
        )
        await self.server.start()

    def run(self, sequence_id: str, first: int) -> set[bytes]:
        tokens = range(first, first + 17)
        self.manager.open_sequences([OpenPlan(sequence_id, tokens, SPACE)])
        self.manager.commit_blocks([CommitPlan(sequence_id, 17)])
        self.manager.close_sequences([sequence_id])
        return set(prefix_keys(SPACE, tokens, 8))


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what it waits for signals nobody
            await asyncio.sleep(0.01)


@pytest.fixture
async def kvstore(tmp_path):
    kvstore = KvStore(f"unix:{tmp_path / 'kv.sock'}")
    await kvstore.start()
    yield kvstore
    await kvstore.server.stop(0)


@pytest.fixture
async def follower(kvstore):
    follower = PoolFollower(kvstore.address)
    task = asyncio.create_task(follower.run())
    yield follower
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_follower_sees_what_is_there_and_what_comes(kvstore, follower):
    old = kvstore.run("a", 0)
    await until(lambda: follower.view.keys == old)
    new = kvstore.run("b", 100)
    await until(lambda: follower.view.keys == old | new)


async def test_a_follower_resumes_after_a_lost_connection(kvstore, follower):
    old = kvstore.run("a", 0)
    await until(lambda: follower.view.keys == old)
    await kvstore.server.stop(0)
    new = kvstore.run("b", 100)
    assert follower.view.keys == old
    await kvstore.start()
    await until(lambda: follower.view.keys == old | new)


async def test_a_follower_drops_all_when_the_kvstore_was_restarted(kvstore, follower):
    old = kvstore.run("a", 0)
    await until(lambda: follower.view.keys == old)
    await kvstore.server.stop(0)
    restarted = KvStore(kvstore.address)
    new = restarted.run("b", 100)
    await restarted.start()
    await until(lambda: follower.view.keys == new)
    assert follower.view.number == 1
    await restarted.server.stop(0)


async def test_a_follower_that_misses_an_event_takes_a_snapshot(kvstore, follower, monkeypatch):
    """Fault P4: event 7 of 10 never arrives."""
    apply, lost, snapshots = follower.view.apply, [], []

    def apply_all_but_one(message) -> None:
        if message.WhichOneof("event") == "snapshot":
            snapshots.append(message.number)
        elif message.number == 7 and not lost:
            lost.append(message)
            return
        apply(message)

    monkeypatch.setattr(follower.view, "apply", apply_all_but_one)
    await until(lambda: follower.view.is_current)
    for index in range(10):
        kvstore.run(f"{index}", 100 * index)
    number = kvstore.manager.events().number
    await until(lambda: follower.view.is_current and follower.view.number == number)
    assert len(lost) == 1
    assert snapshots[-1] >= 7
    findable = kvstore.manager.events().snapshot().keys.tobytes()
    assert follower.view.keys == set(split_keys(findable))


async def test_a_follower_that_fell_behind_takes_a_snapshot(kvstore, follower):
    kvstore.manager.events().capacity = 60
    await until(lambda: follower.view.is_current)
    for index in range(20):  # on one turn of the event loop
        last = kvstore.run(f"{index}", 1000 * index)
    await until(lambda: follower.view.number == kvstore.manager.events().number)
    assert last <= follower.view.keys
    assert len(follower.view.keys) <= 16
