"""Random paged KV, canaries and tolerances for tests of kernels on any device."""

from __future__ import annotations

import math

import torch

from compute.kernels.reference import ReferenceKernels

ORACLE = ReferenceKernels()
CANARY = 77.0  # a number that every type has, e4m3 excepted
NOWHERE = 2**31 - 1  # a block id that no pool has
E4M3 = torch.float8_e4m3fn


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    if dtype == torch.float32:
        return {"rtol": 2e-5, "atol": 2e-5}  # sums in another order
    if dtype == torch.float16:
        return {"rtol": 2e-3, "atol": 2e-3}  # weights and output: 11 significant bits
    # Weights and output have 8 significant bits; the interpreter cuts them off unrounded.
    return {"rtol": 2e-2, "atol": 2e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def guarded(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor in the middle of a larger one that is full of canaries: (whole, part)."""
    rows, *rest = shape
    whole = torch.full((rows + 2, *rest), CANARY, dtype=dtype, device=device)
    return whole, whole[1:-1]


def assert_guards_stand(whole: torch.Tensor) -> None:
    assert (whole[0] == CANARY).all()
    assert (whole[-1] == CANARY).all()


def bits(x: torch.Tensor) -> torch.Tensor:
    """As integers, so that NaN equals NaN and types that cannot be compared can be."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(sizes[x.element_size()])


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(bits(actual.cpu()), bits(expected.cpu()))


class Paged:
    """Sequences of random KV, scattered over the blocks of a pool whose rest is NaN.

    One layer of three, so that it is a strided view. Quantized KV is random bytes with
    random scales; what no sequence has is NaN in e4m3 and has NaN for a scale in int8.
    """

    def __init__(
        self, lengths, *, head_size, block_size=16, num_kv_heads=2, dtype=torch.float32
    ) -> None:
        needed = [-(-length // block_size) for length in lengths]
        num_blocks = sum(needed) + 3
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7)).tolist()
        shape = (num_blocks, 3, 2, block_size, num_kv_heads, head_size)
        is_quantized = dtype in (E4M3, torch.int8)
        if is_quantized:
            self.pool = torch.full(shape, 127, dtype=torch.int8).view(dtype)
        else:
            self.pool = torch.full(shape, math.nan, dtype=dtype)
        self.all_scales = torch.full(shape[:5], math.nan) if is_quantized else None
        self.tables = torch.full((len(lengths), max(needed) + 2), NOWHERE, dtype=torch.int32)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        for n, length in enumerate(lengths):
            for index in range(needed[n]):
                block_id = order.pop()
                self.tables[n, index] = block_id
                used = min(block_size, length - index * block_size)
                self._fill(block_id, used)

    def _fill(self, block_id: int, used: int) -> None:
        part = self.kv[block_id, :, :used]
        if self.scales is None:
            part.copy_(randn(*part.shape, seed=block_id))
            return
        numbers = randn(*part.shape, seed=block_id)
        numbers *= (127 if part.dtype == torch.int8 else 448) / numbers.abs().max()
        part.copy_(numbers)
        scales = self.scales[block_id, :, :used]
        scales.copy_(0.01 * (1 + randn(*scales.shape, seed=block_id + 1).abs()))

    @property
    def kv(self) -> torch.Tensor:
        return self.pool[:, 1]

    @property
    def scales(self) -> torch.Tensor | None:
        return None if self.all_scales is None else self.all_scales[:, 1]

    def to(self, device: torch.device) -> Paged:
        """The same on a device; on the CPU a copy."""
        other = object.__new__(Paged)
        for name, x in vars(self).items():
            setattr(other, name, None if x is None else x.clone().to(device))
        return other
