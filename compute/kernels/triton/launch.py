"""What is launched: a kernel, its grid and its arguments, apart from the launching.

A wrapper first makes plans. Running them is the same for all kernels, and what does not
run (compilation ahead of time, of which bench/kernel_aot.py makes its table) compiles
just what would run, since it takes the plans from the same wrapper.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Target(NamedTuple):
    """What a kernel is compiled for: 90 is compute capability 9.0; 0 the interpreter."""

    capability: int

    @property
    def converts_fp8(self) -> bool:
        """Whether there is an instruction for it; otherwise the bits are taken apart."""
        return self.capability >= 89

    @property
    def shared_bytes(self) -> int:
        """Of shared memory, what one program may have."""
        by_capability = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227}
        return by_capability.get(self.capability, 99) * 1024


INTERPRETER = Target(0)


def target_of(x: torch.Tensor) -> Target:
    """Of the device that `x` lies on; tensors of the CPU are for the interpreter."""
    if not x.is_cuda:
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(x.device)
    return Target(10 * major + minor)


class Config(NamedTuple):
    """How a tile is worked on: by how many warps, with how many loads under way."""

    num_warps: int
    num_stages: int = 1


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch. `tile_bytes`: what a program moves per turn of its loop (docs/kernels.md)."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    config: Config
    tile_bytes: int = 0

    def run(self) -> None:
        """Enqueue it on the current stream of the device that its tensors lie on."""
        if 0 in self.grid:
            return
        tensor = next(x for x in self.arguments.values() if isinstance(x, torch.Tensor))
        with torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext():
            self.kernel[self.grid](
                **self.arguments,
                num_warps=self.config.num_warps,
                num_stages=self.config.num_stages,
            )


def power_of_two(size: int) -> int:
    """The first one that is not below `size`: extents of tiles are powers of two."""
    return 1 << (size - 1).bit_length()


def pieces(size: int, length: int) -> int:
    """How many pieces of `length` cover `size`."""
    return -(-size // length)
