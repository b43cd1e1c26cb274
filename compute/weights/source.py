"""What a checkpoint offers, and the check that it is the whole model and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from compute.errors import WeightsInvalid
from compute.families.names import Place

Progress = Callable[[int, int], None]  # tensors read, tensors in all
Cut = Callable[[str, torch.Tensor], torch.Tensor]  # our name, a tensor -> a part of it

_MAX_NAMED = 3  # in a message about many tensors


class WeightSource(Protocol):
    """Tensors of a checkpoint, read one at a time."""

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors."""

    @property
    def places(self) -> Mapping[str, Place]:
        """By our names, where this kind of checkpoint has what the model needs."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every stored tensor by its own name, tied duplicates and derived ones left out."""

    def read(self, stored: str) -> torch.Tensor:
        """A stored tensor, in fp32 or the type it is stored in.

        Raises:
            WeightsInvalid: the file does not give it.
        """


class Weights:
    """The tensors of one model, each converted to `dtype` as it is taken.

    Raises:
        WeightsInvalid: at construction, if tensors are missing, unknown or misshaped;
            nothing but headers has been read by then.
    """

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        progress: Progress = lambda _done, _total: None,
        cut: Cut = lambda _name, tensor: tensor,
    ) -> None:
        """`cut` takes what this process needs of a tensor."""
        _check_complete(source)
        self._cut = cut
        self._source = source
        self._dtype = dtype
        self._progress = progress
        self._num_taken = 0

    def take(self, name: str) -> torch.Tensor:
        """A private copy. Taking each tensor once makes the progress end at its total.

        Raises:
            WeightsInvalid: it cannot be read, or holds values that are not finite in `dtype`.
        """
        place = self._source.places[name]
        whole = place.cut(self._source.read(place.stored))
        tensor = self._cut(name, whole).to(self._dtype, copy=True).contiguous()
        if not torch.isfinite(tensor).all():
            raise WeightsInvalid(
                f"tensor {place.stored!r} holds values that are not finite", tensor=place.stored
            )
        self._num_taken += 1
        self._progress(self._num_taken, len(self._source.places))
        return tensor

    def take_rows(self, names: list[str]) -> torch.Tensor:
        """Several tensors under each other, for products that share their input."""
        return torch.cat([self.take(name) for name in names])


def _check_complete(source: WeightSource) -> None:
    found = source.shapes
    expected = {place.stored: place.shape for place in source.places.values()}
    where = source.files[0].name if len(source.files) == 1 else source.files[0].parent.name
    missing = [name for name in expected if name not in found]
    if missing:
        raise WeightsInvalid(f"{where}: tensors missing: {_listed(missing)}", tensor=missing[0])
    extra = [name for name in found if name not in expected]
    if extra:
        raise WeightsInvalid(f"{where}: tensors of no use: {_listed(extra)}", tensor=extra[0])
    for name, shape in expected.items():
        if found[name] != shape:
            raise WeightsInvalid(
                f"{where}: tensor {name!r} has shape {list(found[name])}, "
                f"the configuration says {list(shape)}",
                tensor=name,
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
