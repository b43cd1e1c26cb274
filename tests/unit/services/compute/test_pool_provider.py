"""compute.ports.PoolProvider over a kvstore that comes, goes and is replaced."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from quire.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc

from compute.errors import LayoutMismatch, PoolUnavailable
from compute.types import KvShape, PosixMemory
from kvstore.attachment import ManagerOptions
from kvstore.fakes import FakeStorage
from kvstore.manager import PageManager
from services.common.server import GrpcServer
from services.compute.pool_provider import GrpcPoolProvider
from services.kvstore.servicer import KvCacheServicer

SHAPE = KvShape(2, 1, 8, "bfloat16")


@pytest.fixture
def address(tmp_path):
    return f"unix:{tmp_path / 'kv.sock'}"


@pytest.fixture
def provider(address):
    provider = GrpcPoolProvider(address)
    yield provider
    provider.close()


async def start(address: str, memory: int = 10_000) -> GrpcServer:
    manager = PageManager(ManagerOptions(memory, 8), FakeStorage())
    name = kvstore_pb2.DESCRIPTOR.services_by_name["KvCacheService"].full_name
    server = GrpcServer(
        address,
        [name],
        lambda s: kvstore_pb2_grpc.add_KvCacheServiceServicer_to_server(
            KvCacheServicer(manager), s
        ),
    )
    await server.start()
    return server


async def test_the_handle_arrives_whole_and_stays_the_same(address, provider):
    server = await start(address)
    handle = await asyncio.to_thread(provider.attach_pool, SHAPE)
    assert (handle.memory, handle.offset_bytes) == (PosixMemory("quire-none"), 4096)
    assert (handle.layout.shape, handle.layout.block_size) == (SHAPE, 8)
    assert handle.layout.num_blocks == 10_000 // (8 * 2 * 2 * 8 * 2)
    assert handle.size_bytes == handle.layout.num_blocks * 8 * 2 * 2 * 8 * 2
    assert await asyncio.to_thread(provider.attach_pool, SHAPE) == handle
    await server.stop(0)


async def test_refusals_of_the_kvstore_come_with_its_reason(address, provider):
    server = await start(address, memory=100)
    with pytest.raises(PoolUnavailable, match="--kv-memory") as caught:
        await asyncio.to_thread(provider.attach_pool, SHAPE)
    assert caught.value.metadata["available_bytes"] == "100"
    await server.stop(0)


async def test_a_pool_of_another_shape_is_a_mismatch(address, provider):
    server = await start(address)
    await asyncio.to_thread(provider.attach_pool, SHAPE)
    other = dataclasses.replace(SHAPE, num_layers=3)
    with pytest.raises(LayoutMismatch, match="num_layers=3"):
        await asyncio.to_thread(provider.attach_pool, other)
    await server.stop(0)


async def test_a_kvstore_that_is_away_is_unavailable_until_it_returns(address, provider):
    with pytest.raises(PoolUnavailable, match="kvstore"):
        await asyncio.to_thread(provider.attach_pool, SHAPE)
    server = await start(address)
    first = await attach_when_back(provider)
    await server.stop(0)
    with pytest.raises(PoolUnavailable):
        await asyncio.to_thread(provider.attach_pool, SHAPE)
    server = await start(address)
    second = await attach_when_back(provider)
    assert second.generation != first.generation
    await server.stop(0)


async def attach_when_back(provider: GrpcPoolProvider):
    """The channel notices a returned server with a delay; the test's timeout bounds it."""
    while True:
        try:
            return await asyncio.to_thread(provider.attach_pool, SHAPE)
        except PoolUnavailable:
            await asyncio.sleep(0.05)
