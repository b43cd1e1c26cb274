"""GGUF files of architecture llama, dequantized to fp32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from compute.config import ModelConfig
from compute.errors import ModelNotFound, ModelUnsupported, WeightsInvalid
from compute.weights.names import from_gguf, is_derived

_ARCHITECTURE = "llama"


class GgufSource:
    """One GGUF file, mapped, and dequantized as tensors are asked for.

    Raises:
        ModelNotFound: no such file.
        ModelUnsupported: another architecture, or a quantization we cannot undo.
        WeightsInvalid: the file is truncated or corrupt.
    """

    def __init__(self, path: Path, config: ModelConfig) -> None:
        if not path.is_file():
            raise ModelNotFound(f"{path}: no such file")
        self._path = path
        self._num_heads = {"q": config.num_q_heads, "k": config.num_kv_heads}
        reader = _open(path)
        _check_architecture(reader, path)
        self._tensors: dict[str, Any] = {}
        for tensor in reader.tensors:
            if not is_derived(tensor.name):
                _check_type(tensor, path)
                self._tensors[from_gguf(tensor.name) or tensor.name] = tensor

    @property
    def files(self) -> list[Path]:
        return [self._path]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        # GGUF writes the fastest axis first.
        return {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        # A copy: what is stored as fp32 would come as a view of the read-only file.
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        loaded = torch.from_numpy(values.reshape(self.shapes[name]))
        part = name.removesuffix(".bias").rpartition(".")[2]
        if part in self._num_heads:
            loaded = _with_split_halves(loaded, self._num_heads[part])
        return loaded


def _with_split_halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of the rows of a query or key projection.

    Its rotary embedding turns neighbours (0, 1), (2, 3), …; ours and Hugging Face's
    turns row i with row i + D/2. rows [H*D] or [H*D, E].
    """
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _open(path: Path) -> Any:
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # the reader trips over bad bytes in many ways
        raise WeightsInvalid(f"{path.name}: truncated or corrupt GGUF file: {error}") from None


def _check_architecture(reader: Any, path: Path) -> None:
    field = reader.get_field("general.architecture")
    architecture = None if field is None else field.contents()
    if architecture != _ARCHITECTURE:
        raise ModelUnsupported(
            f"{path.name}: GGUF architecture {architecture!r}: we run {_ARCHITECTURE!r}"
        )


def _check_type(tensor: Any, path: Path) -> None:
    """Dequantize one row: a table of the types that can be would age."""
    row = tensor.data.reshape(-1, tensor.data.shape[-1])[:1]
    try:
        gguf.dequantize(row, tensor.tensor_type)
    except NotImplementedError:
        raise ModelUnsupported(
            f"{path.name}: tensor {tensor.name!r} of type {tensor.tensor_type.name}"
        ) from None
