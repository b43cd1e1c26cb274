"""Page managers over memory that nobody maps; every one is audited when its test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvstore.attachment import ManagerOptions
from kvstore.fakes import FakeStorage
from kvstore.manager import PageManager
from kvstore.types import KvShape, Namespace, OpenPlan

SHAPE = KvShape(num_layers=1, num_kv_heads=1, head_size=8, dtype="bfloat16")


def make_manager(
    num_blocks: int, block_size: int = 8, num_host_blocks: int = 0, storage=None, **options
) -> PageManager:
    block_bytes = block_size * SHAPE.token_bytes
    names = {name: options.pop(name) for name in ("reached", "clock") if name in options}
    manager = PageManager(
        ManagerOptions(
            num_blocks * block_bytes,
            block_size,
            host_memory_bytes=num_host_blocks * block_bytes,
            **options,
        ),
        storage or FakeStorage(),
        **names,
    )
    manager.attach_pool(SHAPE)
    return manager


@pytest.fixture
def managers() -> Iterator[Callable[..., PageManager]]:
    made: dict[int, PageManager] = {}

    def make(*arguments, storage=None, **options) -> PageManager:
        storage = storage or FakeStorage()
        manager = make_manager(*arguments, storage=storage, **options)
        made[id(storage)] = manager  # one before it is a process that was killed
        kept.append(storage)
        return manager

    kept: list[FakeStorage] = []  # or another could get its identity
    yield make
    for manager in made.values():
        assert manager.audit() == []


NAMESPACE = Namespace(b"m" * 32)


@pytest.fixture
def plan() -> Callable[..., OpenPlan]:
    """A plan for `length` tokens that count up from `first`."""

    def make(sequence_id: str, length: int, first: int = 0, namespace=NAMESPACE) -> OpenPlan:
        return OpenPlan(sequence_id, list(range(first, first + length)), namespace)

    return make


@pytest.fixture
def shape() -> KvShape:
    return SHAPE


@pytest.fixture
def storage() -> FakeStorage:
    return FakeStorage()
