"""GGUF files of architecture llama, dequantized to fp32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from compute.config import ModelConfig
from compute.errors import ModelNotFound, ModelUnsupported
from compute.weights.gguf_file import GgufFile
from compute.weights.names import from_gguf, is_derived

_ARCHITECTURE = "llama"


class GgufSource:
    """One GGUF file, mapped, and dequantized as tensors are asked for.

    Raises:
        ModelNotFound: no such file.
        ModelUnsupported: another architecture, or a version or type we do not know.
        WeightsInvalid: the file is truncated or corrupt.
    """

    def __init__(self, path: Path, config: ModelConfig) -> None:
        if not path.is_file():
            raise ModelNotFound(f"{path}: no such file")
        self._path = path
        self._num_heads = {"q": config.num_q_heads, "k": config.num_kv_heads}
        file = GgufFile(path)
        architecture = file.metadata.get("general.architecture")
        if architecture != _ARCHITECTURE:
            raise ModelUnsupported(
                f"{path.name}: GGUF architecture {architecture!r}: we run {_ARCHITECTURE!r}"
            )
        self._tensors = {
            from_gguf(name) or name: tensor
            for name, tensor in file.tensors.items()
            if not is_derived(name)
        }

    @property
    def files(self) -> list[Path]:
        return [self._path]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        loaded = self._tensors[name].dequantized()
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
