"""Hugging Face checkpoints: one safetensors file, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from compute.config import ModelConfig
from compute.errors import ModelNotFound, ModelUnsupported, WeightsInvalid
from compute.families import FAMILIES
from compute.families.names import Place, places

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsSource:
    """A directory of safetensors. Files are mapped, and read as tensors are asked for.

    Raises:
        ModelNotFound: the directory has no weights.
        ModelUnsupported: a tensor of a type we do not compute with.
        WeightsInvalid: a file is truncated or corrupt, a shard is missing, or files and
            index disagree.
    """

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        self._names = FAMILIES[config.family].names
        self._files = _find_files(directory)
        self._holders: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in self._files:
            self._add_file(path)
        _check_index(directory / _INDEX, self._files)
        is_whole = any(name.startswith(self._names.prefix) for name in self._shapes)
        self._places = places(config, self._names, self._names.prefix if is_whole else "")
        if config.tie_word_embeddings:
            self._drop_tied_head()

    @property
    def files(self) -> list[Path]:
        return self._files

    @property
    def places(self) -> Mapping[str, Place]:
        return self._places

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, stored: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._holders[stored].get_tensor(stored)
        except SafetensorError as error:
            raise WeightsInvalid(f"tensor {stored!r}: {error}", tensor=stored) from None
        return tensor

    def _add_file(self, path: Path) -> None:
        file = _open(path)
        for stored in file.keys():  # noqa: SIM118 - not a mapping
            if self._names.is_derived(stored):
                continue
            header = file.get_slice(stored)
            if header.get_dtype() not in _DTYPES:
                raise ModelUnsupported(
                    f"{path.name}: tensor {stored!r} of type {header.get_dtype()}"
                )
            if stored in self._holders:
                raise WeightsInvalid(f"{path.name}: tensor {stored!r} appears twice")
            self._holders[stored] = file
            self._shapes[stored] = tuple(header.get_shape())

    def _drop_tied_head(self) -> None:
        """Checkpoints of tied models may store the head as well; it must say the same."""
        head, embedding = f"{self._names.head}.weight", self._places["embedding"].stored
        if head not in self._shapes:
            return
        if embedding in self._shapes and not torch.equal(self.read(head), self.read(embedding)):
            raise WeightsInvalid(
                f"tie_word_embeddings is set but {head} differs from {embedding}", tensor=head
            )
        del self._shapes[head], self._holders[head]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightsInvalid(f"{path.name}: truncated or corrupt: {error}") from None


def _find_files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.is_file():
        return [directory / name for name in sorted(set(_weight_map(index).values()))]
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelNotFound(f"{directory}: no *.safetensors file")
    if len(files) > 1:
        raise WeightsInvalid(f"{directory}: several *.safetensors files and no {_INDEX}")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WeightsInvalid(f"{index.name}: not an index: {error!r}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsInvalid(f"{index.name}: its weight_map is empty or no object")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise WeightsInvalid(f"{index.name}: tensor {name!r} is in no file beside the index")
        if not (index.parent / file).is_file():
            raise WeightsInvalid(f"{index.name}: {file} with tensor {name!r} is missing")
    return weight_map


def _check_index(index: Path, files: list[Path]) -> None:
    """Each tensor that the index promises is in the shard that it names."""
    if not index.is_file():
        return
    held = {path.name: set(_open(path).keys()) for path in files}
    for name, file in _weight_map(index).items():
        if name not in held[file]:
            raise WeightsInvalid(f"{file}: tensor {name!r} is missing", tensor=name)
