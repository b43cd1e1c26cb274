"""What the compiled kernels share: pointers, bfloat16, exp, and their place in the team.

Kernels work on raw pointers instead of arrays: an array argument costs a microsecond
per call, its indices are checked for negative values, and numba knows no bfloat16.
Every kernel has the C type void(int64_t *arguments); the arguments are addresses, sizes,
strides (in elements) and the bits of doubles, after the two that compute.threads.Team
prescribes.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I32 = ir.IntType(32)

# Contraction into fused multiply-adds, and sums in any order so that they vectorise.
# Not nnan or ninf: models do produce infinities, and they must come out as such.
FAST = {"contract", "reassoc", "nsz"}


def _cache_folder() -> str:
    """One folder per state of these sources.

    numba looks for changes in the file of the kernel only, not in what it calls.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    base = os.environ.get("NUMBA_CACHE_DIR")
    root = Path(base) if base else Path.home() / ".cache" / "quire" / "kernels"
    return str(root / digest.hexdigest()[:16])


numba.config.CACHE_DIR = _cache_folder()


def kernel(function: Callable[..., Any]) -> Any:
    """Decorator: compile for the C type void(int64_t *); `.address` is where it lies."""
    signature = types.void(types.CPointer(types.int64))
    return numba.cfunc(signature, nopython=True, cache=True, fastmath=FAST, error_model="numpy")(
        function
    )


def helper(function: Callable[..., Any]) -> Any:
    """Decorator of a function that kernels call. LLVM inlines it."""
    return numba.njit(fastmath=FAST, error_model="numpy", cache=True)(function)


def _pointer_type(element: Any) -> Any:
    def implementation(_context: Any, address: Any) -> Any:
        signature = types.CPointer(element)(types.int64)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return signature, codegen

    return implementation


f32_at = intrinsic(_pointer_type(types.float32))
bf16_at = intrinsic(_pointer_type(types.uint16))  # numba has no bfloat16: its bits
i32_at = intrinsic(_pointer_type(types.int32))
i64_at = intrinsic(_pointer_type(types.int64))


@intrinsic
def f32_plus(_context: Any, pointer: Any, _count: Any) -> Any:
    """f32_plus(pointer, count): the pointer `count` elements further on."""

    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.int64), codegen


@intrinsic
def _call(_context: Any, address: Any) -> Any:
    """Call the C function int(void) at an address."""

    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.IntType(32), [])
        return builder.call(builder.inttoptr(args[0], function.as_pointer()), [])

    return types.int32(types.int64), codegen


@intrinsic
def bits_to_f32(_context: Any, bits: Any) -> Any:
    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def bits_to_f64(_context: Any, bits: Any) -> Any:
    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), codegen


@helper
def thread_number(arguments):  # type: ignore[no-untyped-def]
    """The number of the calling thread, below arguments[1]."""
    if arguments[0] == 0:
        return np.int64(0)
    return np.int64(_call(arguments[0]))


@intrinsic
def load(_context: Any, pointer: Any, _index: Any) -> Any:
    """load(pointer, index): an element as fp32."""

    def codegen(_target: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = builder.load(builder.gep(args[0], [args[1]]))
        if signature.args[0].dtype == types.float32:
            return element
        bits = builder.shl(builder.zext(element, _I32), _I32(16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(pointer, types.int64), codegen


@intrinsic
def store(_context: Any, pointer: Any, _index: Any, _value: Any) -> Any:
    """store(pointer, index, value): write an fp32, as bf16 rounded to the nearest, ties to even."""

    def codegen(_target: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = args[2]
        if signature.args[0].dtype != types.float32:
            element = _rounded_to_bf16(builder, element)
        builder.store(element, builder.gep(args[0], [args[1]]))
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    return types.void(pointer, types.int64, types.float32), codegen


def _rounded_to_bf16(builder: Any, value: Any) -> Any:
    bits = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    rounded = builder.add(builder.add(bits, _I32(0x7FFF)), odd)
    # Rounding could carry a NaN's payload into its sign, or drop it: keep it a quiet NaN.
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, _I32(0x7FFFFFFF)), _I32(0x7F800000))
    quiet = builder.or_(bits, _I32(0x400000))
    chosen = builder.select(is_nan, quiet, rounded)
    return builder.trunc(builder.lshr(chosen, _I32(16)), ir.IntType(16))


_LOG2_E = np.float32(math.log2(math.e))
# ln 2 in two parts: the first has few enough bits that n * _LN2_HIGH is exact.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(math.log(2) - 0.693359375)
_SMALLEST = np.float32(-87.0)  # exp of it is still a normal number
_C7, _C6, _C5, _C4, _C3, _C2 = (np.float32(1 / math.factorial(n)) for n in (7, 6, 5, 4, 3, 2))
_ONE, _HALF = np.float32(1), np.float32(0.5)


# No reassociation here: it would add the two parts of ln 2 up again.
@numba.njit(fastmath={"contract"}, error_model="numpy", cache=True)
def exp_below_one(x):  # type: ignore[no-untyped-def]
    """exp(x) for x <= 0, in fp32; 0 below -87; within 2 units in the last place.

    Free of branches and calls so that loops over it vectorise, which libm's does not.
    exp(x) = 2^n exp(r) with |r| <= ln(2) / 2, where the Taylor series to r^7 is off by
    less than 6e-9.
    """
    clamped = max(x, _SMALLEST)
    n = np.floor(clamped * _LOG2_E + _HALF)
    r = clamped - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = _C7 * r + _C6
    p = p * r + _C5
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + _C2
    p = p * r * r + r + _ONE
    power = bits_to_f32((np.int32(n) + np.int32(127)) << np.int32(23))
    return p * power if x >= _SMALLEST else np.float32(0)
