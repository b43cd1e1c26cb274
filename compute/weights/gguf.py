"""GGUF files of architecture llama, dequantized to fp32."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from compute.config import ModelConfig
from compute.errors import ModelNotFound, ModelUnsupported
from compute.rope import RopeConfig, inverse_frequencies
from compute.weights.gguf_file import GgufFile, GgufTensor
from compute.weights.names import from_gguf, is_derived

_ARCHITECTURE = "llama"
_DIVISORS = "rope_freqs.weight"


class GgufSource:
    """One GGUF file, mapped, and dequantized as tensors are asked for.

    Raises:
        ModelNotFound: no such file.
        ModelUnsupported: another architecture, a version or type we do not know, or
            rotary frequencies that are not those of the configuration.
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
        _check_rope(path, file, config.rope)
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


def _check_rope(path: Path, file: GgufFile, rope: RopeConfig) -> None:
    """Configurations made from GGUF files lose the scaling of positions, which would only
    show as worse answers."""
    scaling = file.metadata.get(f"{_ARCHITECTURE}.rope.scaling.type", "none")
    divisors = file.tensors.get(_DIVISORS)
    if scaling != "none" and rope.kind == "default":
        raise ModelUnsupported(
            f"{path.name}: rope.scaling.type {scaling!r} is missing in the configuration"
        )
    if divisors is not None and not _gives(divisors, rope):
        raise ModelUnsupported(
            f"{path.name}: {_DIVISORS} contradicts rope_type {rope.kind!r} of the configuration"
        )


def _gives(divisors: GgufTensor, rope: RopeConfig) -> bool:
    """Whether the default frequencies divided by `divisors` [D/2] are those of `rope`."""
    plain, _ = inverse_frequencies(dataclasses.replace(rope, kind="default"))
    expected, _ = inverse_frequencies(rope)
    if divisors.shape != plain.shape:
        return False
    return torch.allclose(plain / divisors.dequantized(), expected, rtol=1e-3, atol=0)


def _with_split_halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of the rows of a query or key projection.

    Its rotary embedding turns neighbours (0, 1), (2, 3), …; ours and Hugging Face's
    turns row i with row i + D/2. rows [H*D] or [H*D, E].
    """
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
