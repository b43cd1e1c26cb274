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
from numba.core import cgutils
from numba.extending import intrinsic

_I32, _F32 = ir.IntType(32), ir.FloatType()

FP32, BF16, INT8 = 0, 1, 2  # kinds of elements
# numba has no bfloat16; `load` and `store` take these 16 bits for one.
_ELEMENTS = (types.float32, types.uint16, types.int8)
LOWEST = np.float32(-3.4e38)  # below every score, and still a number
# Contraction into fused multiply-adds, and sums in any order so that they vectorise.
# Not nnan or ninf: models do produce infinities, and they must come out as such.
FUSE = ("contract",)
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
    def implementation(_context: Any, _address: Any) -> Any:
        signature = types.CPointer(element)(types.int64)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return signature, codegen

    return implementation


def clear_cache() -> None:
    """Delete our compiled code from the disk. What is damaged there is compiled again then."""
    for path in Path(numba.config.CACHE_DIR).rglob("*.nb[ic]"):
        path.unlink(missing_ok=True)


f32_at = intrinsic(_pointer_type(types.float32))
i32_at = intrinsic(_pointer_type(types.int32))
i64_at = intrinsic(_pointer_type(types.int64))


@intrinsic(prefer_literal=True)
def elements(_context: Any, _address: Any, _index: Any, kind: Any) -> Any:
    """elements(address, index, kind): a pointer to the element `index` of a tensor.

    `kind` is a constant: FP32 or False, BF16 or True, INT8.
    """
    element = _ELEMENTS[int(kind.literal_value)]
    signature = types.CPointer(element)(types.int64, types.int64, kind)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base = builder.inttoptr(args[0], context.get_value_type(signature.return_type))
        return builder.gep(base, [args[1]])

    return signature, codegen


@intrinsic
def f32_plus(_context: Any, pointer: Any, _count: Any) -> Any:
    """f32_plus(pointer, count): the pointer `count` elements further on."""

    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.int64), codegen


@intrinsic
def _call(_context: Any, _address: Any) -> Any:
    """Call the C function int(void) at an address."""

    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.IntType(32), [])
        return builder.call(builder.inttoptr(args[0], function.as_pointer()), [])

    return types.int32(types.int64), codegen


@intrinsic
def bits_to_f32(_context: Any, _bits: Any) -> Any:
    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def bits_to_f64(_context: Any, _bits: Any) -> Any:
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
            element = emit_rounding(builder, element)
        builder.store(element, builder.gep(args[0], [args[1]]))
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    return types.void(pointer, types.int64, types.float32), codegen


def emit_rounding(builder: Any, value: Any) -> Any:
    """LLVM code for the bits of the nearest bf16, ties to even: of an fp32 or a vector of it."""
    wide, narrow = _integers(value.type, _I32), _integers(value.type, ir.IntType(16))

    def number(n: int) -> Any:
        return _constant(wide, n)

    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, number(16)), number(1))
    rounded = builder.add(builder.add(bits, number(0x7FFF)), odd)
    # Rounding could carry a NaN's payload into its sign, or drop it: keep it a quiet NaN.
    magnitude = builder.and_(bits, number(0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", magnitude, number(0x7F800000))
    chosen = builder.select(is_nan, builder.or_(bits, number(0x400000)), rounded)
    return builder.trunc(builder.lshr(chosen, number(16)), narrow)


def _integers(kind: Any, integer: Any) -> Any:
    """The type of as many integers as `kind` has floats."""
    return ir.VectorType(integer, kind.count) if isinstance(kind, ir.VectorType) else integer


def _constant(kind: Any, value: float) -> Any:
    """A number, or a vector of it."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [kind.element(value)] * kind.count)
    return kind(value)


_SMALLEST = -87.0  # exp of it is still a normal number
# ln 2 in two parts: the first has few enough bits that n * _LN2_HIGH is exact.
_LN2_HIGH = 0.693359375
_LN2_LOW = math.log(2) - _LN2_HIGH
_TAYLOR = [1 / math.factorial(n) for n in range(7, -1, -1)]


def emit_exp(builder: Any, x: Any) -> Any:
    """LLVM code for exp(x), x <= 0: fp32 or a vector of it.

    exp(x) = 2^n exp(r) with |r| <= ln(2) / 2, where the Taylor series to r^7 is off by
    less than 6e-9. The error is within 2 units in the last place; below -87 the result
    is 0, and that of NaN is NaN. Unlike libm's, it has no calls and no branches, so loops
    over it vectorise. No reassociation here: it would add the parts of ln 2 up again.
    """
    integer = _integers(x.type, _I32)

    def real(value: float) -> Any:
        return _constant(x.type, float(np.float32(value)))

    def fused(a: Any, b: Any, c: Any) -> Any:
        return builder.fadd(builder.fmul(a, b, flags=FUSE), c, flags=FUSE)

    smallest = real(_SMALLEST)
    is_small = builder.fcmp_ordered("<", x, smallest)
    clamped = builder.select(is_small, smallest, x)
    number = builder.select(builder.fcmp_ordered(">", x, smallest), x, smallest)
    suffix = f"v{x.type.count}f32" if isinstance(x.type, ir.VectorType) else "f32"
    floor = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(x.type, [x.type]), f"llvm.floor.{suffix}"
    )
    n = builder.call(floor, [fused(number, real(1 / math.log(2)), real(0.5))])
    r = fused(n, real(-_LN2_HIGH), clamped)
    r = fused(n, real(-_LN2_LOW), r)
    series = real(_TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        series = fused(series, r, real(coefficient))
    exponent = builder.add(builder.fptosi(n, integer), _constant(integer, 127))
    power = builder.bitcast(builder.shl(exponent, _constant(integer, 23)), x.type)
    return builder.select(is_small, real(0), builder.fmul(series, power))


@intrinsic
def exp_below_one(_context: Any, _x: Any) -> Any:
    """exp_below_one(x): exp(x) for x <= 0; see emit_exp."""

    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return emit_exp(builder, args[0])

    return types.float32(types.float32), codegen
