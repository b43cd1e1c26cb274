"""Page managers over memory that nobody maps; every one is audited when its test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvstore.fakes import NoMemory
from kvstore.manager import PageManager
from kvstore.types import KvShape, Namespace, OpenPlan

SHAPE = KvShape(num_layers=1, num_kv_heads=1, head_size=8, dtype="bfloat16")


def make_manager(num_blocks: int, block_size: int = 8) -> PageManager:
    manager = PageManager(num_blocks * block_size * SHAPE.token_bytes, block_size, NoMemory)
    manager.attach_pool(SHAPE)
    return manager


@pytest.fixture
def managers() -> Iterator[Callable[..., PageManager]]:
    made: list[PageManager] = []

    def make(num_blocks: int, block_size: int = 8) -> PageManager:
        made.append(make_manager(num_blocks, block_size))
        return made[-1]

    yield make
    for manager in made:
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
def no_memory() -> type[NoMemory]:
    return NoMemory
