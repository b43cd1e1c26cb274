"""Row-wise kernels: norms and the activation. One row per token."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from compute.kernels.cpu.jit import (
    bits_to_f64,
    elements,
    exp_below_one,
    kernel,
    load,
    store,
    thread_number,
)


@functools.cache
def rms_norm_kernel(size: int, bf16: bool, add: bool) -> Any:
    """out = rms_norm(x) * weight over rows of `size`; with `add`, x is added to residual first.

    Arguments: team (2); x, its row stride; residual, stride; weight; out, stride;
    rows; eps (double).
    """

    def rms_norm(arguments):  # type: ignore[no-untyped-def]
        me = thread_number(arguments)
        num_threads = arguments[1]
        x_stride, residual_stride, out_stride = arguments[3], arguments[5], arguments[8]
        num_rows = arguments[9]
        eps = np.float32(bits_to_f64(arguments[10]))
        for t in range(me * num_rows // num_threads, (me + 1) * num_rows // num_threads):
            x = elements(arguments[2], t * x_stride, bf16)
            residual = elements(arguments[4], t * residual_stride, bf16)
            weight = elements(arguments[6], 0, bf16)
            out = elements(arguments[7], t * out_stride, bf16)
            total = np.float32(0)
            if add:
                for e in range(size):
                    store(residual, e, load(residual, e) + load(x, e))
                for e in range(size):
                    total += load(residual, e) * load(residual, e)
            else:
                for e in range(size):
                    total += load(x, e) * load(x, e)
            factor = np.float32(1) / np.float32(math.sqrt(total / np.float32(size) + eps))
            for e in range(size):
                if add:
                    store(out, e, load(residual, e) * factor * load(weight, e))
                else:
                    store(out, e, load(x, e) * factor * load(weight, e))

    return kernel(rms_norm)


@functools.cache
def silu_mul_kernel(bf16: bool) -> Any:
    """out = silu(gate) * up, element by element.

    Arguments: team (2); gate_up, its row stride; out, stride; rows; I.
    """

    def silu_mul(arguments):  # type: ignore[no-untyped-def]
        me = thread_number(arguments)
        num_threads = arguments[1]
        size = arguments[7]
        # Columns are shared out, not rows: even one row keeps all threads busy.
        first, last = me * size // num_threads, (me + 1) * size // num_threads
        for t in range(arguments[6]):
            gate = elements(arguments[2], t * arguments[3], bf16)
            up = elements(arguments[2], t * arguments[3] + size, bf16)
            out = elements(arguments[4], t * arguments[5], bf16)
            for i in range(first, last):
                x = load(gate, i)
                # exp of a number below 0 cannot overflow, whatever the sign of x.
                e = exp_below_one(-abs(x))
                numerator = x if x >= 0 else x * e
                store(out, i, numerator / (np.float32(1) + e) * load(up, i))

    return kernel(silu_mul)
