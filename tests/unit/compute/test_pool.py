"""Attaching shared memory: what is mapped, what is refused, what is let go."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from compute.errors import LayoutMismatch, PoolUnavailable
from compute.pool import AttachedPool
from compute.types import KvShape, PosixMemory

SHAPE = KvShape(num_layers=3, num_kv_heads=2, head_size=4, dtype="float32")


@pytest.fixture
def handle(make_pool):
    return make_pool(num_blocks=5, block_size=8).attach_pool(SHAPE)


def _file(handle) -> Path:
    return Path("/dev/shm") / handle.memory.name


def _is_mapped(handle) -> bool:
    return handle.memory.name in Path("/proc/self/maps").read_text()


def test_two_attachments_see_the_same_memory(handle):
    first, second = AttachedPool(handle, SHAPE), AttachedPool(handle, SHAPE)
    assert first.tensor.shape == (5, 3, 2, 8, 2, 4)
    first.tensor[3, 2, 1, 7, 1, 3] = 42.0
    assert second.tensor[3, 2, 1, 7, 1, 3] == 42.0
    assert torch.count_nonzero(second.tensor) == 1
    first.close()
    second.close()


def test_the_tensor_is_the_files_bytes_in_c_order(handle):
    attached = AttachedPool(handle, SHAPE)
    attached.tensor.flatten().copy_(torch.arange(attached.tensor.numel()))
    stored = torch.frombuffer(bytearray(_file(handle).read_bytes()), dtype=torch.float32)
    assert torch.equal(stored[: attached.tensor.numel()], attached.tensor.flatten())
    attached.close()


def test_an_offset_is_respected(handle):
    layout = dataclasses.replace(handle.layout, num_blocks=2)
    block_bytes = handle.size_bytes // 5
    part = dataclasses.replace(
        handle, layout=layout, offset_bytes=3 * block_bytes, size_bytes=2 * block_bytes
    )
    whole, tail = AttachedPool(handle, SHAPE), AttachedPool(part, SHAPE)
    whole.tensor[3].fill_(7.0)
    assert (tail.tensor[0] == 7.0).all()
    assert (tail.tensor[1] == 0.0).all()
    whole.close()
    tail.close()


def test_bfloat16_pools_are_attached_as_such(make_pool):
    shape = dataclasses.replace(SHAPE, dtype="bfloat16")
    attached = AttachedPool(make_pool().attach_pool(shape), shape)
    assert attached.tensor.dtype == torch.bfloat16
    attached.close()


def test_closing_unmaps_and_leaves_the_memory_to_its_owner(handle):
    attached = AttachedPool(handle, SHAPE)
    assert _is_mapped(handle)
    attached.close()
    attached.close()
    assert not _is_mapped(handle)
    assert _file(handle).exists()
    with pytest.raises(PoolUnavailable, match="closed"):
        _ = attached.tensor


def test_a_view_that_is_still_held_stays_readable_until_it_is_dropped(handle):
    attached = AttachedPool(handle, SHAPE)
    view = attached.tensor[1]
    attached.close()
    assert (view == 0).all()
    del view, attached
    assert not _is_mapped(handle)


def test_a_pool_whose_owner_unlinked_it_is_unavailable_and_an_attached_one_lives_on(handle):
    attached = AttachedPool(handle, SHAPE)
    _file(handle).unlink()
    with pytest.raises(PoolUnavailable, match="No such file"):
        AttachedPool(handle, SHAPE)
    attached.tensor.fill_(1.0)
    attached.close()


@pytest.mark.parametrize("name", ["", "/", "..", "a/b", "../etc/passwd", "a\0b"])
def test_names_that_lead_elsewhere_are_refused(handle, name):
    with pytest.raises(PoolUnavailable, match="no name of shared memory"):
        AttachedPool(dataclasses.replace(handle, memory=PosixMemory(name)), SHAPE)


def test_a_pool_smaller_than_its_handle_says_is_refused(handle):
    with _file(handle).open("r+b") as file:
        file.truncate(handle.size_bytes - 1)
    with pytest.raises(PoolUnavailable, match=f"{handle.size_bytes - 1} bytes"):
        AttachedPool(handle, SHAPE)
    assert not _is_mapped(handle)


@pytest.mark.parametrize(
    "change",
    [{"num_layers": 4}, {"num_kv_heads": 1}, {"head_size": 8}, {"dtype": "bfloat16"}],
)
def test_kv_of_another_shape_is_a_mismatch(handle, change):
    with pytest.raises(LayoutMismatch, match="the model writes"):
        AttachedPool(handle, dataclasses.replace(SHAPE, **change))


def test_a_handle_that_contradicts_itself_is_a_mismatch(handle):
    for change in (
        {"size_bytes": handle.size_bytes - 4},
        {"offset_bytes": -64},
        {"offset_bytes": 2},
        {"layout": dataclasses.replace(handle.layout, num_blocks=0)},
    ):
        with pytest.raises(LayoutMismatch):
            AttachedPool(dataclasses.replace(handle, **change), SHAPE)


def test_a_type_we_do_not_compute_with_is_a_mismatch(handle):
    shape = dataclasses.replace(SHAPE, dtype="float64")
    layout = dataclasses.replace(handle.layout, shape=shape)
    with pytest.raises(LayoutMismatch, match="float64"):
        AttachedPool(dataclasses.replace(handle, layout=layout), shape)


# --- quantized KV -----------------------------------------------------------


@pytest.fixture(params=["int8", "fp8_e4m3"])
def quantized(request, make_pool):
    shape = KvShape(num_layers=3, num_kv_heads=2, head_size=16, dtype=request.param)
    attached = AttachedPool(make_pool(num_blocks=5, block_size=8).attach_pool(shape), shape)
    yield attached
    attached.close()


def test_scales_are_behind_the_elements_that_they_are_for(quantized):
    elements, scales = 8 * 2 * 16, 8 * 2 * 4  # bytes of a plane
    block_bytes = 3 * 2 * (elements + scales)
    assert quantized.blocks.shape == (5, block_bytes)
    assert quantized.handle.size_bytes == 5 * block_bytes
    for block, layer, kind, token, head in [(0, 0, 0, 0, 0), (3, 2, 1, 7, 1), (4, 1, 0, 5, 0)]:
        plane = (layer * 2 + kind) * (elements + scales)
        element = plane + (token * 2 + head) * 16 + 9
        quantized.blocks[block, element] = 0x38  # 1 in fp8, 56 in int8
        value = 1.0 if quantized.tensor.dtype == torch.float8_e4m3fn else 56.0
        assert quantized.tensor[block, layer, kind, token, head, 9].float() == value
        scale = plane + elements + (token * 2 + head) * 4
        quantized.scales[block, layer, kind, token, head] = 0.5
        stored = quantized.blocks[block, scale : scale + 4].clone().view(torch.float32)
        assert stored == 0.5
    assert torch.count_nonzero(quantized.blocks) == 3 * 2  # 0.5 has one byte that is not 0


def test_views_of_quantized_kv_are_strided_and_cover_every_byte_once(quantized):
    assert quantized.tensor.shape == (5, 3, 2, 8, 2, 16)
    assert quantized.scales.shape == (5, 3, 2, 8, 2)
    assert quantized.tensor.stride() == (1920, 640, 320, 32, 16, 1)
    assert quantized.scales.stride() == (480, 160, 80, 2, 1)
    quantized.tensor.view(torch.uint8).fill_(1)
    quantized.scales.copy_(torch.tensor([1, 1, 1, 1], dtype=torch.uint8).view(torch.float32))
    assert (quantized.blocks == 1).all()


def test_scales_and_elements_are_aligned_for_vectors_of_16_bytes(quantized):
    for view in (quantized.tensor, quantized.scales):
        size = view.element_size()
        assert view.data_ptr() % 16 == 0
        assert all(stride * size % 16 == 0 for stride in view.stride()[:3])


def test_other_kv_has_no_scales_and_is_dense(make_pool):
    for dtype in ("float32", "float16", "bfloat16"):
        shape = dataclasses.replace(SHAPE, dtype=dtype)
        attached = AttachedPool(make_pool().attach_pool(shape), shape)
        assert attached.scales is None
        assert attached.tensor.is_contiguous()
        assert attached.tensor.dtype == getattr(torch, dtype)
        assert attached.blocks.numel() == attached.tensor.numel() * attached.tensor.element_size()
        attached.close()


def test_scales_that_would_not_be_aligned_are_a_mismatch(make_pool):
    shape = KvShape(num_layers=1, num_kv_heads=1, head_size=4, dtype="int8")
    with pytest.raises(LayoutMismatch, match="scales are behind 32 bytes"):
        AttachedPool(make_pool(block_size=8).attach_pool(shape), shape)


def test_after_closing_there_are_no_views(quantized):
    quantized.close()
    assert quantized.is_closed
    for name in ("tensor", "scales", "blocks"):
        with pytest.raises(PoolUnavailable, match="closed"):
            getattr(quantized, name)
