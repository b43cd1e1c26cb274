"""Several clients of one kvstore at once, each of which keeps its own books."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from quire.kvstore.v1 import kvstore_pb2 as pb
from quire.kvstore.v1 import kvstore_pb2_grpc

from tests.integration.kvstore_client import Books, play
from tests.integration.kvstore_driver import Driver
from tests.integration.kvstore_process import BLOCK_SIZE, SHAPE, KvStoreProcess, findings, listed

NUM_BLOCKS, NUM_HOST_BLOCKS = 16, 8
NUM_CLIENTS, NUM_CALLS = 6, 300


@pytest.fixture
def kvstore() -> Iterator[KvStoreProcess]:
    with tempfile.TemporaryDirectory(prefix="quire-test-") as folder:
        server = KvStoreProcess(Path(folder), NUM_BLOCKS, NUM_HOST_BLOCKS)
        try:
            server.start()
            with server.channel() as channel:
                server.stub(channel).AttachPool(pb.AttachPoolRequest(shape=SHAPE))
            yield server
            assert server.stop() == 0
            assert not server.objects()
        finally:
            server.end()


def assert_nothing_is_left(kvstore: KvStoreProcess) -> None:
    with kvstore.channel() as channel:
        stub = kvstore.stub(channel)
        assert not findings(stub)
        assert not listed(stub)
        assert not stub.ListPins(pb.ListPinsRequest()).pins
        stub.AcquireDriverLease(pb.AcquireDriverLeaseRequest())  # copies under way are over
        stats = stub.GetStats(pb.GetStatsRequest())
        assert stats.held_block_count == 0
        assert stats.free_block_count + stats.cached_block_count == NUM_BLOCKS
        host = stats.host
        assert host.free_block_count + host.cached_block_count == NUM_HOST_BLOCKS
        assert not findings(stub)


async def test_a_driver_and_clients_never_write_to_the_same_block(kvstore):
    """Between any two calls, the blocks that each may write to are its own alone."""
    clients = [Books(f"c{number}", number) for number in range(NUM_CLIENTS)]
    with kvstore.channel() as channel:
        lease = kvstore.stub(channel).AcquireDriverLease(pb.AcquireDriverLeaseRequest())
    driver = Driver("driver", lease.epoch)

    async def one(books: Books) -> None:
        async with grpc.aio.insecure_channel(kvstore.address, options=[OWN_CHANNEL]) as channel:
            await play(books, kvstore_pb2_grpc.KvCacheServiceStub(channel), NUM_CALLS, watch)

    async def drive() -> None:
        async with grpc.aio.insecure_channel(kvstore.address, options=[OWN_CHANNEL]) as channel:
            stub = kvstore_pb2_grpc.KvCacheServiceStub(channel)
            await driver.drive(stub, NUM_CALLS, watch)

    def watch() -> None:
        owners: dict[int, str] = {}
        for books in (*clients, driver):
            for block in books.writable():
                assert owners.setdefault(block, books.name) == books.name, f"block {block}"

    await asyncio.gather(drive(), *map(one, clients))
    assert driver.num_copies, "nothing went to the host pool"
    assert sum(books.num_refused for books in clients), "the pool was never too small"
    assert sum(books.num_hits for books in clients), "nobody ever found anything"
    assert_nothing_is_left(kvstore)


# Channels to one address share a connection unless they differ.
OWN_CHANNEL = ("grpc.use_local_subchannel_pool", 1)


def test_clients_in_processes_of_their_own_leave_nothing(kvstore):
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.integration.kvstore_client",
                kvstore.address,
                str(number),
            ],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for number in range(3)
    ]
    try:
        results = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
    assert all(result["calls"] >= NUM_CALLS for result in results)
    assert_nothing_is_left(kvstore)


async def test_clients_outlast_a_kvstore_that_is_killed_among_them(kvstore):
    """What was answered is there again; what was not is asked for again."""
    clients = [Books(f"c{number}", number) for number in range(3)]
    killer = random.Random(1)

    async def disturb() -> None:
        for _ in range(3):
            await asyncio.sleep(killer.uniform(0.1, 0.3))
            kvstore.kill()
            await asyncio.to_thread(kvstore.start)
            with kvstore.channel() as channel:
                found = findings(kvstore.stub(channel))
                assert not found

    async def one(books: Books) -> None:
        async with grpc.aio.insecure_channel(
            kvstore.address,
            options=[OWN_CHANNEL, ("grpc.max_reconnect_backoff_ms", 100)],
        ) as channel:
            stub = kvstore_pb2_grpc.KvCacheServiceStub(channel)
            await play(books, stub, NUM_CALLS, lambda: None, outlasts=True)

    await asyncio.gather(disturb(), *map(one, clients))
    assert sum(books.num_cuts for books in clients) >= 3
    assert_nothing_is_left(kvstore)


def test_the_older_of_two_drivers_is_refused_everywhere(kvstore):
    """Every call with an epoch: the message types say which those are."""
    service = pb.DESCRIPTOR.services_by_name["KvCacheService"]
    methods = [m for m in service.methods if "driver_epoch" in m.input_type.fields_by_name]
    assert len(methods) >= 10
    with kvstore.channel() as channel:
        stub = kvstore.stub(channel)
        old = stub.AcquireDriverLease(pb.AcquireDriverLeaseRequest(driver_id="old")).epoch
        mine = pb.OpenPlan(sequence_id="s", token_ids=range(2 * BLOCK_SIZE))
        request = pb.OpenSequencesRequest(plans=[mine], driver_epoch=old)
        stub.OpenSequences(request)
        new = stub.AcquireDriverLease(
            pb.AcquireDriverLeaseRequest(driver_id="new", adopts=True)
        ).epoch
        assert new > old
        before = listed(stub), stub.GetStats(pb.GetStatsRequest())
        for method in methods:
            request = getattr(pb, method.input_type.name)(driver_epoch=old)
            if method.name == "PinPrefix":
                request.sequence_id = "s"
            with pytest.raises(grpc.RpcError) as caught:
                getattr(stub, method.name)(request)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION, method.name
            assert "another driver" in caught.value.details()
        update = pb.UpdateSequencesRequest(closes=["s"], driver_epoch=old)
        with pytest.raises(grpc.RpcError, match="another driver"):
            next(stub.DriveSequences(iter([pb.DriveSequencesRequest(update=update)])))
        stub.ReleaseDriverLease(pb.ReleaseDriverLeaseRequest(epoch=old))
        after = listed(stub), stub.GetStats(pb.GetStatsRequest())
        assert (after[0], with_audits_of(after[1], before[1])) == before
        stub.CloseSequences(pb.CloseSequencesRequest(sequence_ids=["s"], driver_epoch=new))
    assert_nothing_is_left(kvstore)


def with_audits_of(stats: pb.GetStatsResponse, other: pb.GetStatsResponse) -> pb.GetStatsResponse:
    stats.audit_count = other.audit_count
    return stats
