"""A kvstore to ask: a real server over a pool in name only."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from kvstore.attachment import ManagerOptions
from kvstore.fakes import FakeStorage
from kvstore.manager import PageManager
from kvstore.types import CommitPlan, KvShape, Namespace, OpenPlan, PinPlan, TenantLimits
from services.cli.main import main
from tests import kvstore_server

SHAPE = KvShape(2, 1, 8, "bfloat16")
BLOCK_BYTES = 8 * SHAPE.token_bytes
SPACE = Namespace(b"m" * 32, tenant="acme")


@pytest.fixture
def manager():
    limits = {"acme": TenantLimits(floor=4, quota=12)}
    return PageManager(ManagerOptions(16 * BLOCK_BYTES, 8, tenants=limits), FakeStorage())


@pytest.fixture
def busy(manager):
    """Its pool has a sequence, a pin and some cached blocks."""
    manager.attach_pool(SHAPE)
    for sequence_id, first in (("a", 0), ("b", 1000)):
        manager.open_sequences([OpenPlan(sequence_id, range(first, first + 20), SPACE)])
        manager.commit_blocks([CommitPlan(sequence_id, 20)])
    manager.pin_prefix(PinPlan("p", "me", 60, SPACE, range(16)))
    manager.close_sequences(["b"])
    return manager


@pytest.fixture
async def address(manager, tmp_path):
    server = await kvstore_server.started(manager, tmp_path)
    yield server.address
    await server.stop(0)


@pytest.fixture
def quire(capsys, monkeypatch):
    """Run a command beside the server; its exit status, what it printed, its errors."""
    monkeypatch.setenv("COLUMNS", "80")

    async def run(*words: str) -> tuple[int, str, str]:
        with capture_logs():  # the server's
            status = await asyncio.to_thread(main, list(words))
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run
