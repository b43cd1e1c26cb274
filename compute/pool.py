"""Attaching a page pool that another process owns."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from compute.dtypes import torch_dtype
from compute.errors import LayoutMismatch, PoolUnavailable
from compute.mapping import MapMemory, MappedMemory
from compute.types import SCALE_BYTES, KvShape, PoolHandle, PoolLayout, PosixMemory

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is, not a temporary file
_ALIGNMENT = 64  # bytes: a cache line


class PosixMapping:
    """Mapped POSIX shared memory: compute.mapping.MappedMemory."""

    def __init__(self, data: torch.Tensor) -> None:
        # The tensor alone keeps the mapping: torch gives its buffer back at once, so that
        # closing the mapping by hand would succeed with views of it alive.
        self.data = data

    def is_orphaned(self) -> bool:
        """Never: it outlasts its owner, as long as we have it mapped."""
        return False

    def close(self) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)


def map_posix(handle: PoolHandle) -> PosixMapping:
    """Map a pool in POSIX shared memory: compute.mapping.MapMemory."""
    if not isinstance(handle.memory, PosixMemory):
        raise PoolUnavailable(
            "the pool is in a GPU's memory, and this worker computes on the CPU: start compute "
            "with --device cuda, or the kvstore with --device cpu"
        )
    memory = _map_object(handle.memory.name, handle.offset_bytes + handle.size_bytes)
    return PosixMapping(
        torch.frombuffer(
            memory, dtype=torch.uint8, offset=handle.offset_bytes, count=handle.size_bytes
        )
    )


class AttachedPool:
    """A mapped page pool, three views of its memory without a copy.

    tensor  [P, L, 2, B, Hkv, D]  keys and values; dense unless they are quantized
    scales  [P, L, 2, B, Hkv]     fp32, of quantized KV; else None
    blocks  [P, block_bytes]      uint8, dense: all of a block, its scales too

    Attached from construction until `close`. Nothing is written to it before use.
    """

    def __init__(
        self, handle: PoolHandle, shape: KvShape, map_memory: MapMemory = map_posix
    ) -> None:
        """Map the pool of `handle`, which must hold KV of `shape`.

        Raises:
            LayoutMismatch: it holds other KV, or sizes in the handle contradict each other.
            PoolUnavailable: there is no such memory, or less than the handle says, or it is
                of a kind that `map_memory` does not map.
        """
        _check_layout(handle, shape)
        self.handle = handle
        self._mapping: MappedMemory | None = map_memory(handle)
        self._blocks = self._mapping.data.view(handle.layout.num_blocks, -1)
        self._tensor, self._scales = _views(self._blocks, handle.layout)

    @property
    def tensor(self) -> torch.Tensor:
        self._check_open()
        return self._tensor

    @property
    def scales(self) -> torch.Tensor | None:
        self._check_open()
        return self._scales

    @property
    def blocks(self) -> torch.Tensor:
        self._check_open()
        return self._blocks

    @property
    def is_closed(self) -> bool:
        return self._mapping is None

    def is_orphaned(self) -> bool:
        """The process that its memory depends on has ended, so that it should be closed."""
        return self._mapping is not None and self._mapping.is_orphaned()

    def close(self) -> None:
        """Let go of the memory, which is unmapped once no view of it is left."""
        if self._mapping is not None:
            self._blocks = self._tensor = torch.empty(0, dtype=torch.uint8)
            self._scales = None
            mapping, self._mapping = self._mapping, None
            mapping.close()

    def _check_open(self) -> None:
        if self._mapping is None:
            raise PoolUnavailable(f"pool {self.handle.generation:x} was closed")


def _check_layout(handle: PoolHandle, shape: KvShape) -> None:
    layout = handle.layout
    if layout.shape != shape:
        raise LayoutMismatch(
            f"the pool holds KV of {layout.shape}, the model writes {shape}",
            pool=layout.shape,
            model=shape,
        )
    torch_dtype(shape.dtype)
    if layout.num_blocks < 1 or layout.block_size < 1:
        raise LayoutMismatch(f"{layout.num_blocks} blocks of {layout.block_size} tokens")
    if handle.size_bytes != layout.pool_bytes:
        raise LayoutMismatch(
            f"the handle says {handle.size_bytes} bytes, its layout needs {layout.pool_bytes}"
        )
    if handle.offset_bytes < 0 or handle.offset_bytes % _ALIGNMENT:
        raise LayoutMismatch(f"offset {handle.offset_bytes} is not a multiple of {_ALIGNMENT}")
    if shape.is_quantized and layout.plane_elements_bytes % _ALIGNMENT:
        raise LayoutMismatch(
            f"scales are behind {layout.plane_elements_bytes} bytes of {shape.dtype}, which is not "
            f"a multiple of {_ALIGNMENT}"
        )


def _views(blocks: torch.Tensor, layout: PoolLayout) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Elements [P, L, 2, B, Hkv, D], and their scales [P, L, 2, B, Hkv] if they have some."""
    shape, size = layout.shape, layout.plane_elements_bytes
    planes = blocks.view(layout.num_blocks, shape.num_layers, 2, layout.plane_bytes)
    heads = (layout.block_size, shape.num_kv_heads)
    elements = planes[..., :size].view(torch_dtype(shape.dtype))
    tensor = elements.unflatten(-1, (*heads, shape.head_size))
    if not shape.is_quantized:
        return tensor, None
    assert (layout.plane_bytes - size) % SCALE_BYTES == 0
    return tensor, planes[..., size:].view(torch.float32).unflatten(-1, heads)


def _map_object(name: str, size_bytes: int) -> mmap.mmap:
    """The first bytes of a shared memory object."""
    file_name = name.removeprefix("/")
    if not file_name or "/" in file_name or "\0" in file_name or file_name in (".", ".."):
        raise PoolUnavailable(f"{name!r} is no name of shared memory")
    try:
        descriptor = os.open(_SHARED_MEMORY / file_name, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise PoolUnavailable(f"pool {name!r}: {error.strerror}") from None
    try:
        size = os.fstat(descriptor).st_size
        if size < size_bytes:
            raise PoolUnavailable(f"pool {name!r} has {size} bytes, the handle says {size_bytes}")
        return mmap.mmap(descriptor, size_bytes)
    except OSError as error:
        raise PoolUnavailable(f"pool {name!r} cannot be mapped: {error.strerror}") from None
    finally:
        os.close(descriptor)
