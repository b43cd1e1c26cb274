"""The inner loops of attention, written as LLVM vectors.

The first two multiply a few rows (heads or queries) with the keys or values of some tokens. All
sums of a pass stay in registers: 8 or 9 of them, so that as many multiply-adds are in
flight as the latency asks for, and 16 registers suffice for the operands too. The
compiler's own vectorisation of plain loops keeps the sums in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from compute.kernels.cpu.jit import FUSE, LOWEST, emit_exp, emit_rounding

WIDTH = 8  # floats per vector; LLVM splits it where the registers are shorter
_TOKENS = 4  # tokens per pass of `scores`
_SCORE_ROWS, _VALUE_ROWS = 2, 3  # most rows per pass
_COLUMNS = {1: 8, 2: 4, 3: 3}  # vectors per pass of `add_values`, by its rows
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_F32 = ir.FloatType()
_VECTOR = ir.VectorType(_F32, WIDTH)
_ZERO = ir.Constant(_VECTOR, [0.0] * WIDTH)


@intrinsic(prefer_literal=True)
def scores(  # type: ignore[no-untyped-def]
    _context, q, _num_rows, k, _stride, _count, p, _width, head_size, ahead
):
    """scores(q, num_rows, k, stride, count, p, width, head_size, ahead): p = q k^T.

    q [num_rows, head_size] and p [num_rows, width] are dense fp32; k holds `count` rows
    of fp32 or bf16, `stride` elements apart. p is also written, with nonsense, up to the next
    multiple of 4. Meanwhile as many rows from `ahead` on, if not None, are fetched into
    the caches.
    """
    size = head_size.literal_value
    signature = types.void(
        q, types.int64, k, types.int64, types.int64, p, types.int64, head_size, ahead
    )

    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        q, num_rows, k, stride, count, p, width, _, next_k = args
        last = builder.sub(count, _I64(1))
        groups = builder.sdiv(builder.add(count, _I64(_TOKENS - 1)), _I64(_TOKENS))

        def one_pass(first_row: Any, rows: int) -> None:
            with cgutils.for_range(builder, groups, intp=_I64) as group:
                first = builder.mul(group.index, _I64(_TOKENS))
                keys = []
                for j in range(_TOKENS):
                    token = builder.add(first, _I64(j))
                    # A group that reaches past the end repeats the last token.
                    token = builder.select(builder.icmp_signed("<", token, last), token, last)
                    at = builder.mul(token, stride)
                    keys.append(builder.gep(k, [at]))
                    if not isinstance(ahead, types.NoneType):
                        # The first pass alone: the others find its lines on their way.
                        with builder.if_then(builder.icmp_signed("==", first_row, _I64(0))):
                            _emit_fetch(builder, next_k, at, size)
                sums = [[_ZERO] * _TOKENS for _ in range(rows)]
                for d in range(0, size, WIDTH):
                    vectors = [load_vector(builder, key, _I64(d)) for key in keys]
                    for r in range(rows):
                        row = builder.add(first_row, _I64(r))
                        at = builder.add(builder.mul(row, _I64(size)), _I64(d))
                        x = load_vector(builder, q, at)
                        sums[r] = [
                            add_product(builder, x, y, s)
                            for y, s in zip(vectors, sums[r], strict=True)
                        ]
                for r in range(rows):
                    row = builder.add(first_row, _I64(r))
                    at = builder.add(builder.mul(row, width), first)
                    store_vector(builder, _totals(builder, sums[r]), p, at)

        _for_passes(builder, num_rows, _SCORE_ROWS, one_pass)
        return cgutils.get_null_value(_I8.as_pointer())

    return signature, codegen


@intrinsic(prefer_literal=True)
def add_values(  # type: ignore[no-untyped-def]
    _context, acc, _num_rows, v, _stride, _count, p, _width, head_size, ahead
):
    """add_values(acc, num_rows, v, stride, count, p, width, head_size, ahead): acc += p v.

    acc [num_rows, head_size] and p [num_rows, width] are dense fp32; v and `ahead` are like
    those of `scores`.
    """
    size = head_size.literal_value
    signature = types.void(
        acc, types.int64, v, types.int64, types.int64, p, types.int64, head_size, ahead
    )

    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        acc, num_rows, v, stride, count, p, width, _, next_v = args

        def one_pass(first_row: Any, rows: int) -> None:
            row_numbers = [builder.add(first_row, _I64(r)) for r in range(rows)]
            step = _COLUMNS[rows] * WIDTH
            for first in range(0, size, step):
                columns = range(first, min(first + step, size), WIDTH)
                places = [
                    [builder.add(builder.mul(row, _I64(size)), _I64(d)) for d in columns]
                    for row in row_numbers
                ]
                # LLVM turns these slots into registers.
                sums = [
                    [
                        cgutils.alloca_once_value(builder, load_vector(builder, acc, at))
                        for at in row
                    ]
                    for row in places
                ]
                with cgutils.for_range(builder, count, intp=_I64) as token:
                    offset = builder.mul(token.index, stride)
                    value = builder.gep(v, [offset])
                    if first == 0 and not isinstance(ahead, types.NoneType):
                        with builder.if_then(builder.icmp_signed("==", first_row, _I64(0))):
                            _emit_fetch(builder, next_v, offset, size)
                    vectors = [load_vector(builder, value, _I64(d)) for d in columns]
                    for row, slots in zip(row_numbers, sums, strict=True):
                        at = builder.add(builder.mul(row, width), token.index)
                        weight = splat(builder, builder.load(builder.gep(p, [at])))
                        for x, slot in zip(vectors, slots, strict=True):
                            total = add_product(builder, weight, x, builder.load(slot))
                            builder.store(total, slot)
                for row_places, slots in zip(places, sums, strict=True):
                    for at, slot in zip(row_places, slots, strict=True):
                        store_vector(builder, builder.load(slot), acc, at)

        _for_passes(builder, num_rows, _VALUE_ROWS, one_pass)
        return cgutils.get_null_value(_I8.as_pointer())

    return signature, codegen


@intrinsic
def highest(_context: Any, p: Any, _count: Any) -> Any:
    """highest(p, count): the largest of p[:count]; p is read up to a multiple of 8."""

    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        p, count = args
        low = ir.Constant(_VECTOR, [float(LOWEST)] * WIDTH)
        slot = cgutils.alloca_once_value(builder, low)
        with _for_vectors(builder, count) as (at, is_inside):
            x = builder.select(is_inside, load_vector(builder, p, at), low)
            builder.store(_larger(builder, x, builder.load(slot)), slot)
        return _across(builder, builder.load(slot), _larger)

    return types.float32(p, types.int64), codegen


@intrinsic
def weigh(_context: Any, p: Any, _count: Any, _top: Any) -> Any:
    """weigh(p, count, top): p = exp(p - top) for p[:count], 0 up to a multiple of 8;
    returns the sum."""

    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        p, count, top = args
        top = splat(builder, top)
        slot = cgutils.alloca_once_value(builder, _ZERO)
        with _for_vectors(builder, count) as (at, is_inside):
            x = builder.fsub(load_vector(builder, p, at), top)
            weight = builder.select(is_inside, emit_exp(builder, x), _ZERO)
            store_vector(builder, weight, p, at)
            builder.store(builder.fadd(weight, builder.load(slot)), slot)
        return _across(builder, builder.load(slot), lambda b, x, y: b.fadd(x, y))

    return types.float32(p, types.int64, types.float32), codegen


@contextlib.contextmanager
def _for_vectors(builder: Any, count: Any) -> Iterator[tuple[Any, Any]]:
    """Loop over eight elements at a time: the first one's index, and which are below count."""
    whole = builder.sdiv(builder.add(count, _I64(WIDTH - 1)), _I64(WIDTH))
    with cgutils.for_range(builder, whole, intp=_I64) as loop:
        at = builder.mul(loop.index, _I64(WIDTH))
        left = builder.trunc(builder.sub(count, at), _I32)
        lanes = ir.Constant(ir.VectorType(_I32, WIDTH), list(range(WIDTH)))
        yield at, builder.icmp_signed("<", lanes, splat(builder, left))


def _across(builder: Any, vector: Any, combine: Any) -> Any:
    """All lanes combined into one number."""
    for distance in (4, 2, 1):
        lanes = [(lane + distance) % WIDTH for lane in range(WIDTH)]
        vector = combine(builder, vector, _shuffle(builder, vector, vector, lanes))
    return builder.extract_element(vector, _I32(0))


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _for_passes(builder: Any, num_rows: Any, most: int, one_pass: Any) -> None:
    """Call one_pass(first_row, rows) for `most` rows at a time, then for the rest."""
    whole = builder.sdiv(num_rows, _I64(most))
    with cgutils.for_range(builder, whole, intp=_I64) as loop:
        one_pass(builder.mul(loop.index, _I64(most)), most)
    done = builder.mul(whole, _I64(most))
    left = builder.sub(num_rows, done)
    for rows in range(1, most):
        with builder.if_then(builder.icmp_signed("==", left, _I64(rows))):
            one_pass(done, rows)


def load_vector(builder: Any, pointer: Any, index: Any) -> Any:
    """Eight elements from pointer[index] on, as fp32."""
    element = pointer.type.pointee
    vector = ir.VectorType(element, WIDTH)
    at = builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())
    if element == _F32:
        return builder.load(at, align=4)
    if element == _I8:
        whole = builder.sext(builder.load(at, align=1), ir.VectorType(_I32, WIDTH))
        return builder.sitofp(whole, _VECTOR)
    wide = builder.zext(builder.load(at, align=2), ir.VectorType(_I32, WIDTH))
    shift = ir.Constant(ir.VectorType(_I32, WIDTH), [16] * WIDTH)
    return builder.bitcast(builder.shl(wide, shift), _VECTOR)


def store_vector(builder: Any, vector: Any, pointer: Any, index: Any) -> None:
    """Write a vector of fp32 from pointer[index] on, rounded if its elements are bf16."""
    if pointer.type.pointee != _F32:
        vector = emit_rounding(builder, vector)
    at = builder.bitcast(builder.gep(pointer, [index]), vector.type.as_pointer())
    builder.store(vector, at, align=2)


def _emit_fetch(builder: Any, rows: Any, at: Any, size: int) -> None:
    """Ask for `size` elements from rows[at] on."""
    per_line = 64 // (4 if rows.type.pointee == _F32 else 2)
    for d in range(0, size, per_line):
        emit_prefetch(builder, builder.gep(rows, [builder.add(at, _I64(d))]))


def emit_prefetch(builder: Any, address: Any) -> None:
    """Ask for the line at `address`, which may be invalid."""
    prefetch = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32]),
        "llvm.prefetch.p0",
    )
    builder.call(prefetch, [builder.bitcast(address, _I8.as_pointer()), _I32(0), _I32(2), _I32(1)])


def splat(builder: Any, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, WIDTH)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
    return _shuffle(builder, one, one, [0] * WIDTH)


def add_product(builder: Any, x: Any, y: Any, total: Any) -> Any:
    return builder.fadd(builder.fmul(x, y, flags=FUSE), total, flags=FUSE)


def _shuffle(builder: Any, x: Any, y: Any, lanes: Sequence[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _totals(builder: Any, sums: Sequence[Any]) -> Any:
    """The totals of four vectors as a vector of four: pairs of lanes, then pairs of pairs,
    in the pattern of the processor's horizontal add, then the two halves."""

    def pairs(x: Any, y: Any) -> Any:
        even = _shuffle(builder, x, y, [0, 2, 8, 10, 4, 6, 12, 14])
        odd = _shuffle(builder, x, y, [1, 3, 9, 11, 5, 7, 13, 15])
        return builder.fadd(even, odd)

    quads = pairs(pairs(sums[0], sums[1]), pairs(sums[2], sums[3]))
    low = _shuffle(builder, quads, quads, [0, 1, 2, 3])
    high = _shuffle(builder, quads, quads, [4, 5, 6, 7])
    return builder.fadd(low, high)
