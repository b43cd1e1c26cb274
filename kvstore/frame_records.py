"""The records of a pool's blocks, in memory that may outlive the process."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import LayoutMismatch
from kvstore.types import BlockId

# Four little-endian 32-bit numbers: what this is, its version, frames, tokens of a block.
_HEADER = struct.Struct("<4sIII")
_HEADER_BYTES = 64
_MAGIC, _VERSION = b"QFRM", 1

# Widest first, so that every array is aligned.
_FIELDS = (
    ("generations", np.dtype("<i8")),
    ("parent_generations", np.dtype("<i8")),
    ("last_uses", np.dtype("<i8")),
    ("ref_counts", np.dtype("<i4")),
    ("parents", np.dtype("<i4")),
    ("namespaces", np.dtype("<i4")),
    ("findable", np.dtype(np.bool_)),
)
NO_PARENT = -1


class FrameRecords:
    """One array per field over a buffer, one entry per block.

    - generations: grows whenever the block leaves the free list
    - ref_counts: who holds it
    - findable: it holds what the next fields say; written last, cleared first
    - tokens: those of the block
    - parents, parent_generations: the block before it in its prefix, or NO_PARENT
    - namespaces: the number of its namespace
    - last_uses: a clock's reading when its last holder let go of it

    Whoever maps the buffer may read it: a generation that is the same before and after a
    read says that the block was not given to somebody else meanwhile.
    """

    def __init__(self, num_frames: int, block_size: int, buffer: memoryview | None = None) -> None:
        """Use `buffer`, which is all zeros or was used by an earlier process.

        Raises:
            LayoutMismatch: it has records of other frames.
        """
        self.num_frames, self.block_size = num_frames, block_size
        if buffer is None:
            buffer = memoryview(bytearray(size_bytes(num_frames, block_size)))
        header = (_MAGIC, _VERSION, num_frames, block_size)
        present = _HEADER.unpack_from(buffer)
        if present[0] == bytes(4):
            _HEADER.pack_into(buffer, 0, *header)
        elif present != header:
            raise LayoutMismatch(f"the frame records are for {present}, not for {header}")
        arrays: dict[str, NDArray[Any]] = {}
        at = _HEADER_BYTES
        for name, dtype in _FIELDS:
            arrays[name] = np.frombuffer(buffer, dtype, num_frames, at)
            at = _aligned(at + num_frames * dtype.itemsize)
        self.generations: NDArray[np.int64] = arrays["generations"]
        self.parent_generations: NDArray[np.int64] = arrays["parent_generations"]
        self.last_uses: NDArray[np.int64] = arrays["last_uses"]
        self.ref_counts: NDArray[np.int32] = arrays["ref_counts"]
        self.parents: NDArray[np.int32] = arrays["parents"]
        self.namespaces: NDArray[np.int32] = arrays["namespaces"]
        self.findable: NDArray[np.bool_] = arrays["findable"]
        tokens: NDArray[np.int32] = np.frombuffer(buffer, "<i4", num_frames * block_size, at)
        self.tokens = tokens.reshape(num_frames, block_size)

    def set_parent(self, block_id: BlockId, parent: BlockId) -> None:
        """The block before `block_id` is this one, as it is now, or NO_PARENT."""
        self.parents[block_id] = parent
        self.parent_generations[block_id] = 0 if parent == NO_PARENT else self.generations[parent]


def size_bytes(num_frames: int, block_size: int) -> int:
    """Of the buffer for so many frames."""
    at = _HEADER_BYTES
    for _, dtype in _FIELDS:
        at = _aligned(at + num_frames * dtype.itemsize)
    return at + num_frames * block_size * 4


def _aligned(offset: int) -> int:
    return -(-offset // 64) * 64
