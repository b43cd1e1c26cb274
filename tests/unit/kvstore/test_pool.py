"""The pool's attachment, its counters and the list of its sequences."""

from __future__ import annotations

import dataclasses

import pytest

from kvstore.attachment import ManagerOptions
from kvstore.errors import InvalidRequest, LayoutMismatch, NoRoomForPool, PoolNotAttached
from kvstore.manager import PageManager
from kvstore.types import CommitPlan, ExtendPlan, KvShape, PoolLayout, PoolStats, Update


def test_the_first_attachment_creates_the_pool_and_others_share_it(shape, storage):
    manager = PageManager(ManagerOptions(10_000, 16), storage)
    handle = manager.attach_pool(shape)
    block_bytes = 16 * 2 * 8 * 2
    assert handle.layout == PoolLayout(shape, 16, 10_000 // block_bytes)
    assert handle.size_bytes == handle.layout.num_blocks * block_bytes <= 10_000
    assert manager.attach_pool(shape) == handle
    assert manager.get_pool() == handle


def test_two_pools_never_have_the_same_generation(shape, storage):
    generations = set()
    for _ in "ab":
        manager = PageManager(ManagerOptions(10_000, 16), storage)
        generations.add(manager.attach_pool(shape).generation)
        manager.close()
    assert len(generations) == 2


def test_attaching_another_shape_leaves_the_pool_alone(managers, plan, shape):
    manager = managers(8)
    manager.open_sequences([plan("a", 12)])
    handle, stats = manager.get_pool(), manager.stats()
    with pytest.raises(LayoutMismatch):
        manager.attach_pool(dataclasses.replace(shape, dtype="float32"))
    assert (manager.get_pool(), manager.stats()) == (handle, stats)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_layers": 0}, "shape.layer_count"),
        ({"num_kv_heads": -1}, "shape.kv_head_count"),
        ({"head_size": 0}, "shape.head_size"),
        ({"dtype": "float64"}, "shape.dtype"),
        ({"dtype": "int8", "head_size": 12}, "shape.head_size"),
    ],
)
def test_an_impossible_shape_is_refused_by_field(shape, storage, change, field):
    manager = PageManager(ManagerOptions(10_000, 16), storage)
    with pytest.raises(InvalidRequest) as caught:
        manager.attach_pool(dataclasses.replace(shape, **change))
    assert caught.value.metadata["field"] == field
    with pytest.raises(PoolNotAttached):
        manager.get_pool()


def test_memory_below_one_block_is_no_room(storage):
    manager = PageManager(ManagerOptions(1000, 16), storage)
    with pytest.raises(NoRoomForPool, match="--kv-memory") as caught:
        manager.attach_pool(KvShape(30, 3, 64, "float32"))
    assert caught.value.metadata == {"needed_bytes": "737280", "available_bytes": "1000"}


@pytest.mark.parametrize("block_size", [0, 1, 12, 64])
def test_other_block_sizes_are_refused(block_size):
    with pytest.raises(InvalidRequest, match="block_size"):
        PageManager(ManagerOptions(10_000, block_size))


def test_without_a_pool_there_is_nothing_to_open_and_nothing_to_close(plan, storage):
    manager = PageManager(ManagerOptions(10_000, 16), storage)
    for call in (
        lambda: manager.open_sequences([plan("a", 8)]),
        lambda: manager.extend_sequences([ExtendPlan("a", 8)]),
        lambda: manager.commit_blocks([CommitPlan("a", 8)]),
        lambda: manager.update(Update(opens=[plan("a", 8)])),
        lambda: manager.update(Update(commits=[CommitPlan("a", 8)])),
        lambda: manager.update(Update(extends=[ExtendPlan("a", 8)])),
    ):
        with pytest.raises(PoolNotAttached):
            call()
    manager.close_sequences(["a"])
    assert manager.update(Update(closes=["a"])).refused == []
    assert manager.list_sequences() == ([], "")
    assert manager.stats() == PoolStats()


def test_close_releases_the_memory_once_and_forgets_all(plan, shape, storage):
    manager = PageManager(ManagerOptions(10_000, 16), storage)
    manager.attach_pool(shape)
    manager.open_sequences([plan("a", 8)])
    manager.close()
    manager.close()
    assert [memory.num_closes for memory in storage.made] == [1]
    with pytest.raises(PoolNotAttached):
        manager.get_pool()
    again = manager.attach_pool(shape)
    assert len(storage.made) == 2
    assert manager.list_sequences() == ([], "")
    assert manager.get_pool() == again


def test_sequences_are_listed_in_pages_in_the_order_of_their_opening(managers, plan):
    manager = managers(32)
    names = [f"s{number}" for number in (5, 3, 9, 1, 7)]
    for number, name in enumerate(names):
        manager.open_sequences([plan(name, 8, 100 * number)])
    first, token = manager.list_sequences(2)
    manager.close_sequences([names[0], names[2]])
    manager.open_sequences([plan("late", 8, 900)])
    second, token = manager.list_sequences(2, token)
    third, end = manager.list_sequences(2, token)
    listed = [info.sequence_id for page in (first, second, third) for info in page]
    assert listed == ["s5", "s3", "s1", "s7", "late"]
    assert end == ""


@pytest.mark.parametrize(
    ("size", "token", "field"),
    [
        (-1, "", "page_size"),
        (1001, "", "page_size"),
        (1, "x", "page_token"),
        (1, "²", "page_token"),
    ],
)
def test_an_impossible_page_is_refused_by_field(managers, size, token, field):
    with pytest.raises(InvalidRequest) as caught:
        managers(4).list_sequences(size, token)
    assert caught.value.metadata["field"] == field


def test_a_page_has_a_hundred_sequences_unless_asked_otherwise(managers, plan):
    manager = managers(120)
    manager.open_sequences([plan(str(number), 8, 10 * number) for number in range(120)])
    assert len(manager.list_sequences()[0]) == 100
    assert len(manager.list_sequences(1000)[0]) == 120


def test_hits_and_prompt_tokens_are_counted_once_per_opening(managers, plan):
    manager = managers(16)
    manager.open_sequences([plan("a", 17)])
    manager.open_sequences([plan("a", 17)])  # a repeat
    manager.commit_blocks([CommitPlan("a", 17)])
    manager.open_sequences([plan("b", 20)])
    stats = manager.stats()
    assert (stats.num_prompt_tokens, stats.num_hit_tokens) == (37, 16)
