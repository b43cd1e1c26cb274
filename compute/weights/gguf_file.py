"""Reads the header of a GGUF file and finds the bytes of its tensors.

The reader that the gguf package offers makes an array of every token and every merge of
the vocabulary, which takes seconds; this one steps over what the weights do not need.

Source: the GGUF specification, github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch

from compute.errors import ModelUnsupported, WeightsInvalid

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_FORMATS |= {12: "d"}
_MAX_DIMENSIONS = 4

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A stored tensor; `shape` in our order, slowest axis first."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    data: npt.NDArray[np.uint8]  # rows of bytes, a view of the file

    def dequantized(self) -> torch.Tensor:
        """A copy in fp32.

        Raises:
            ModelUnsupported: a quantization that the gguf package cannot undo.
        """
        try:
            values = gguf.dequantize(self.data, self.kind)
        except NotImplementedError:
            raise ModelUnsupported(f"tensor {self.name!r} of type {self.kind.name}") from None
        # Stored fp32 comes as a view of the read-only file.
        return torch.from_numpy(np.array(values, dtype=np.float32).reshape(self.shape))


class GgufFile:
    """A mapped GGUF file: `metadata` without its arrays, and `tensors` by name.

    Raises:
        ModelUnsupported: a version or tensor type we do not know.
        WeightsInvalid: the file is truncated or not GGUF.
    """

    def __init__(self, path: Path) -> None:
        self.metadata: dict[str, Scalar] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._at = 0
            self._read(path)
        except (struct.error, OverflowError):  # it ends within a number, or before it
            raise WeightsInvalid(f"{path.name}: truncated or corrupt GGUF file") from None
        except ValueError as error:
            raise WeightsInvalid(f"{path.name}: truncated or corrupt GGUF file: {error}") from None

    def _read(self, path: Path) -> None:
        if self._bytes[:4] != _MAGIC:
            raise ValueError("it does not start with GGUF")
        self._at = len(_MAGIC)
        version = self._number("I")
        if version not in _VERSIONS:
            raise ModelUnsupported(f"{path.name}: GGUF version {version}")
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        for _ in range(num_entries):
            self._read_entry()
        headers = [self._tensor_header() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"alignment {alignment}")
        start = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in headers:
            if name in self.tensors:
                raise ValueError(f"tensor {name!r} appears twice")
            self.tensors[name] = self._tensor(name, shape, kind, start + offset)

    def _number(self, code: str) -> int:
        size = struct.calcsize(code)
        (value,) = struct.unpack_from("<" + code, self._bytes, self._at)
        self._at += size
        return int(value)

    def _string(self) -> str:
        size = self._number("Q")
        raw = self._bytes[self._at : self._at + size]
        if len(raw) != size:
            raise ValueError("it ends inside a string")
        self._at += size
        return raw.decode()

    def _read_entry(self) -> None:
        key = self._string()
        kind = self._number("I")
        if kind == _ARRAY:
            self._skip_array()
        elif kind == _STRING:
            self.metadata[key] = self._string()
        else:
            (value,) = struct.unpack_from("<" + _format(kind), self._bytes, self._at)
            self._at += struct.calcsize(_format(kind))
            self.metadata[key] = value

    def _skip_array(self) -> None:
        kind, count = self._number("I"), self._number("Q")
        if kind == _ARRAY:
            raise ValueError("an array of arrays")
        if kind != _STRING:
            self._at += count * struct.calcsize(_format(kind))
            return
        unpack, at = struct.Struct("<Q").unpack_from, self._at
        for _ in range(count):
            at += 8 + unpack(self._bytes, at)[0]
        self._at = at

    def _tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
        # GGUF writes the fastest axis first.
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        if kind not in gguf.GGML_QUANT_SIZES:
            raise ModelUnsupported(f"tensor {name!r} of unknown type {kind}")
        known = gguf.GGMLQuantizationType(kind)
        byte_shape = gguf.quant_shape_to_byte_shape(shape, known)
        size = math.prod(byte_shape)
        if offset + size > len(self._bytes):
            raise ValueError(f"it ends inside tensor {name!r}")
        data = np.frombuffer(self._bytes, dtype=np.uint8, count=size, offset=offset)
        return GgufTensor(name, shape, known, data.reshape(byte_shape))


def _format(kind: int) -> str:
    if kind not in _FORMATS:
        raise ValueError(f"a metadata value of unknown type {kind}")
    return _FORMATS[kind]
