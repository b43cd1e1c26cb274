"""Elements of the pool to numbers and back, for all ways of storing them.

fp8 e4m3 has a sign, 4 bits of exponent with a bias of 7, and 3 bits of mantissa; no
infinities, and NaN where all but the sign is set. Sources: Micikevicius et al. 2022,
arXiv:2209.05433; rounding of subnormals by adding a large number: PyTorch,
c10/util/Float8_e4m3fn.h, whose results these equal bit for bit.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803 (constants of a kernel are in capitals)

import torch
import triton
import triton.language as tl

from compute.kernels.triton.launch import Target

# Adding and subtracting it leaves an fp32 number rounded to an integer, half to even.
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23


def raw(kv: torch.Tensor) -> torch.Tensor:
    """The same elements, fp8 as bytes: so no kernel's signature depends on the device."""
    return kv.view(torch.uint8) if kv.dtype == torch.float8_e4m3fn else kv


def operand_of(dtype: torch.dtype, target: Target) -> tl.dtype:
    """The type of a matrix product's operands. The interpreter has no bf16 products."""
    if dtype == torch.float16:
        return tl.float16
    if dtype == torch.bfloat16 and target.capability:
        return tl.bfloat16
    return tl.float32


@triton.jit
def from_pool(elements, STORAGE: tl.constexpr, DTYPE: tl.constexpr):
    """What was loaded from the pool as numbers of DTYPE, before scales. Always exact."""
    if STORAGE == "e4m3":
        bits = elements.to(tl.uint16)
        magnitude = bits & 0x7F
        # As fp16 the same bits have a bias of 15 where 7 was meant: 2^8 makes up for it.
        half = ((bits & 0x80) << 8) | tl.where(magnitude == 0x7F, 0x7E00, magnitude << 7)
        numbers = (half.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0).to(DTYPE)
    elif STORAGE == "e4m3_native":
        numbers = elements.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:
        numbers = elements.to(DTYPE)
    return numbers


@triton.jit
def to_e4m3(x):
    """fp32 numbers to the bytes of e4m3, to nearest, ties to even; beyond 448 is 448."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    nearest = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = nearest.to(tl.int32) - ((127 - 7) << 3)
    # 2^14 has a unit in the last place of 2^-9, the smallest number there is.
    shifted = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, shifted, tl.minimum(normal, 0x7E))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code.to(tl.uint32) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def to_int8(x):
    """fp32 numbers in ±127 to the nearest integers, ties to even."""
    return (x + ROUNDER - ROUNDER).to(tl.int8)
