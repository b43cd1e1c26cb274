"""Attaching a page pool that another process owns."""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path

import torch

from compute.errors import LayoutMismatch, PoolUnavailable
from compute.types import KvShape, PoolHandle, PoolLayout

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is, not a temporary file
_ALIGNMENT = 64  # bytes: a cache line
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a KV type. Raises LayoutMismatch if we do not compute with it."""
    if name not in _DTYPES:
        raise LayoutMismatch(f"KV of type {name!r}: we compute with {', '.join(_DTYPES)}")
    return _DTYPES[name]


class AttachedPool:
    """A mapped page pool; `tensor` is its memory, [P, L, 2, B, Hkv, D], without a copy.

    Attached from construction until `close`. Nothing is written to it before use.
    """

    def __init__(self, handle: PoolHandle, shape: KvShape) -> None:
        """Map the pool of `handle`, which must hold KV of `shape`.

        Raises:
            LayoutMismatch: it holds other KV, or sizes in the handle contradict each other.
            PoolUnavailable: there is no such memory, or less than the handle says.
        """
        _check_layout(handle, shape)
        self.handle = handle
        # The tensor alone keeps the mapping: torch gives its buffer back at once, so that
        # closing the mapping by hand would succeed with views of it alive.
        self._tensor: torch.Tensor | None = _as_tensor(_map(handle), handle)

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            raise PoolUnavailable(f"pool {self.handle.name!r} was closed")
        return self._tensor

    def close(self) -> None:
        """Let go of the memory, which is unmapped once no view of it is left."""
        self._tensor = None


def _check_layout(handle: PoolHandle, shape: KvShape) -> None:
    layout = handle.layout
    if layout.shape != shape:
        raise LayoutMismatch(
            f"the pool holds KV of {layout.shape}, the model writes {shape}",
            pool=layout.shape,
            model=shape,
        )
    if layout.num_blocks < 1 or layout.block_size < 1:
        raise LayoutMismatch(f"{layout.num_blocks} blocks of {layout.block_size} tokens")
    needed = math.prod(_tensor_shape(layout)) * torch_dtype(shape.dtype).itemsize
    if handle.size_bytes != needed:
        raise LayoutMismatch(
            f"the handle says {handle.size_bytes} bytes, its layout needs {needed}"
        )
    if handle.offset_bytes < 0 or handle.offset_bytes % _ALIGNMENT:
        raise LayoutMismatch(f"offset {handle.offset_bytes} is not a multiple of {_ALIGNMENT}")


def _tensor_shape(layout: PoolLayout) -> tuple[int, ...]:
    shape = layout.shape
    per_layer = (2, layout.block_size, shape.num_kv_heads, shape.head_size)
    return (layout.num_blocks, shape.num_layers, *per_layer)


def _map(handle: PoolHandle) -> mmap.mmap:
    name = handle.name.removeprefix("/")
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise PoolUnavailable(f"{handle.name!r} is no name of shared memory")
    try:
        descriptor = os.open(_SHARED_MEMORY / name, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise PoolUnavailable(f"pool {handle.name!r}: {error.strerror}") from None
    try:
        size = os.fstat(descriptor).st_size
        if size < handle.offset_bytes + handle.size_bytes:
            raise PoolUnavailable(
                f"pool {handle.name!r} has {size} bytes, "
                f"the handle says {handle.offset_bytes + handle.size_bytes}"
            )
        return mmap.mmap(descriptor, handle.offset_bytes + handle.size_bytes)
    except OSError as error:
        raise PoolUnavailable(f"pool {handle.name!r} cannot be mapped: {error.strerror}") from None
    finally:
        os.close(descriptor)


def _as_tensor(memory: mmap.mmap, handle: PoolHandle) -> torch.Tensor:
    dtype = torch_dtype(handle.layout.shape.dtype)
    flat = torch.frombuffer(memory, dtype=dtype, offset=handle.offset_bytes)
    return flat.view(_tensor_shape(handle.layout))
