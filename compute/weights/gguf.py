"""GGUF files of architecture llama, dequantized to fp32."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from compute.config import ModelConfig
from compute.errors import ModelNotFound, ModelUnsupported
from compute.families.names import GGUF_LLAMA, Place, places
from compute.rope import RopeConfig, inverse_frequencies
from compute.weights.gguf_file import GgufFile, GgufTensor

_ARCHITECTURE = "llama"
_FAMILIES = ("llama", "mistral")  # what llama.cpp calls so
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
        file = GgufFile(path)
        architecture = file.metadata.get("general.architecture")
        if architecture != _ARCHITECTURE:
            raise ModelUnsupported(
                f"{path.name}: GGUF architecture {architecture!r}: we run {_ARCHITECTURE!r}"
            )
        if config.family not in _FAMILIES:
            raise ModelUnsupported(
                f"{path.name}: the configuration is of a {config.family}, the file of a llama"
            )
        _check_rope(path, file, config.ropes[0])
        self._places = places(config, GGUF_LLAMA)
        self._tensors = {
            name: tensor for name, tensor in file.tensors.items() if not GGUF_LLAMA.is_derived(name)
        }

    @property
    def files(self) -> list[Path]:
        return [self._path]

    @property
    def places(self) -> Mapping[str, Place]:
        return self._places

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, stored: str) -> torch.Tensor:
        return self._tensors[stored].dequantized()


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
