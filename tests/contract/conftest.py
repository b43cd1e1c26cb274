"""Both implementations of the gateway's ports, over the same real or fake domain."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from quire.compute.v1 import compute_pb2, compute_pb2_grpc

from compute import types as ct
from compute.errors import InvalidStep
from gateway.fakes import FakeKvStore
from kvstore.attachment import ManagerOptions
from kvstore.fakes import FakeStorage
from kvstore.manager import PageManager
from kvstore.types import KvShape
from services.common.server import GrpcServer
from services.compute.servicer import ComputeServicer
from services.compute.step_thread import StepThread, new_executor
from services.gateway.compute_clients import GrpcCompute, LocalCompute
from services.gateway.kvstore_clients import GrpcKvStore, LocalKvStore
from tests import kvstore_server

TRANSPORTS = ("local", "grpc")
SHAPE = KvShape(num_layers=1, num_kv_heads=1, head_size=8, dtype="float32")
BLOCK_SIZE = 8
NUM_BLOCKS = 8


@dataclass
class KvSystem:
    """A gateway's page manager, the one behind it, and the server between them, if any."""

    client: GrpcKvStore | LocalKvStore
    manager: PageManager
    server: GrpcServer | None = None


@pytest.fixture(params=TRANSPORTS)
async def kv(request, tmp_path) -> AsyncIterator[KvSystem]:
    block_bytes = BLOCK_SIZE * SHAPE.token_bytes
    manager = PageManager(ManagerOptions(NUM_BLOCKS * block_bytes, BLOCK_SIZE), FakeStorage())
    manager.attach_pool(SHAPE)
    async for system in kv_system(request.param, manager, tmp_path):
        yield system
    assert manager.audit() == []


@pytest.fixture(params=[*TRANSPORTS, "fake"])
async def store(request, tmp_path) -> AsyncIterator[GrpcKvStore | LocalKvStore | FakeKvStore]:
    """A gateway's page manager with 8 blocks of 8 tokens and as many in the host pool."""
    if request.param == "fake":
        yield FakeKvStore(NUM_BLOCKS, BLOCK_SIZE, host_blocks=NUM_BLOCKS)
        return
    size = NUM_BLOCKS * BLOCK_SIZE * SHAPE.token_bytes
    manager = PageManager(ManagerOptions(size, BLOCK_SIZE, size), FakeStorage())
    manager.attach_pool(SHAPE)
    async for system in kv_system(request.param, manager, tmp_path):
        yield system.client
    assert manager.audit() == []


async def kv_system(transport, manager, tmp_path) -> AsyncIterator[KvSystem]:
    if transport == "local":
        yield KvSystem(LocalKvStore(manager), manager)
        return
    server = await kvstore_server.started(manager, tmp_path)
    client = GrpcKvStore(server.address)
    yield KvSystem(client, manager, server)
    await client.close()
    await server.stop(0)


def next_token(token_ids) -> int:
    return (sum(token_ids) * 31 + len(token_ids)) % 97


@dataclass
class FakeRunner:
    """Draws a function of the tokens so far. Holds a step while `gate` is closed."""

    sequences: dict[str, list[int]] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    running: threading.Event = field(default_factory=threading.Event)
    threads: set[str] = field(default_factory=set)
    steps: list[int] = field(default_factory=list)
    num_resets: int = 0
    generation: int = 1
    present_generation: int = 1
    refresh_error: Exception | None = None
    step_error: Exception | None = None

    def __post_init__(self) -> None:
        self.gate.set()

    def info(self) -> ct.ModelInfo:
        return ct.ModelInfo("fake", b"f" * 32, 97, 512, ct.KvShape(1, 1, 8, "float32"))

    def handle(self) -> ct.PoolHandle:
        layout = ct.PoolLayout(ct.KvShape(1, 1, 8, "float32"), BLOCK_SIZE, NUM_BLOCKS)
        return ct.PoolHandle(ct.PosixMemory("quire-none"), 0, 4096, layout, self.generation)

    def refresh_pool(self) -> None:
        self.gate.wait(30)
        if self.refresh_error is not None:
            raise self.refresh_error
        self.generation = self.present_generation

    def reset(self) -> None:
        self.num_resets += 1
        self.sequences.clear()

    def run(self, step: ct.Step) -> ct.StepResult:
        self.threads.add(threading.current_thread().name)
        self.running.set()
        self.gate.wait(30)
        if self.step_error is not None:
            raise self.step_error
        self.steps.append(step.step_id)
        kept = {k: v for k, v in self.sequences.items() if k not in step.closed}
        known = kept | {s.sequence_id: list(s.token_ids) for s in step.sequences}
        for chunk in step.chunks:
            if chunk.sequence_id not in known:
                raise InvalidStep(f"unknown sequence {chunk.sequence_id!r}")
        self.sequences = known
        return ct.StepResult(step.step_id, [self._draw(c) for c in step.chunks if c.sample], 0.25)

    def _draw(self, chunk: ct.Chunk) -> ct.SampledToken:
        tokens = self.sequences[chunk.sequence_id]
        tokens.append(next_token(tokens))
        return ct.SampledToken(chunk.sequence_id, tokens[-1], -0.5)


@dataclass
class ComputeSystem:
    """A gateway's step runner, the fake behind it, and what is between them, if anything."""

    client: GrpcCompute | LocalCompute
    runner: FakeRunner
    address: str = ""
    server: GrpcServer | None = None
    servicer: ComputeServicer | None = None


@pytest.fixture(params=TRANSPORTS)
async def compute(request, tmp_path) -> AsyncIterator[ComputeSystem]:
    runner = FakeRunner()
    if request.param == "local":
        client = LocalCompute(runner, new_executor())
        yield ComputeSystem(client, runner)
        runner.gate.set()
        await client.close()
        return
    thread = StepThread(runner, new_executor())
    servicer = ComputeServicer()
    servicer.serve(thread)
    address = f"unix:{tmp_path / 'compute.sock'}"
    name = compute_pb2.DESCRIPTOR.services_by_name["ComputeService"].full_name
    server = GrpcServer(
        address,
        [name],
        lambda s: compute_pb2_grpc.add_ComputeServiceServicer_to_server(servicer, s),
    )
    await server.start()
    client = GrpcCompute(address)
    yield ComputeSystem(client, runner, address, server, servicer)
    runner.gate.set()
    await client.close()
    await server.stop(0)
    thread.close()
