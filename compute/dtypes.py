"""Element types by their names: torch's types for them, and who computes with which."""

from __future__ import annotations

import torch

from compute.errors import DtypeUnsupported, LayoutMismatch

_TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_CPU = ("float32", "bfloat16")


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a type of weights or KV. Raises LayoutMismatch if we know none."""
    if name not in _TORCH:
        raise LayoutMismatch(f"elements of type {name!r}: we know {', '.join(_TORCH)}")
    return _TORCH[name]


def check_cpu(dtype: str, kv_dtype: str) -> None:
    """Raises DtypeUnsupported unless CPUs compute in `dtype` over KV in `kv_dtype`."""
    if dtype not in _CPU:
        raise DtypeUnsupported(
            f"--dtype {dtype} is not computed on a CPU: choose {' or '.join(_CPU)}, or --device "
            "cuda",
            dtype=dtype,
        )
    if kv_dtype != dtype:
        raise DtypeUnsupported(
            f"--kv-dtype {kv_dtype} is not computed on a CPU with --dtype {dtype}: choose "
            "--kv-dtype auto, or --device cuda",
            dtype=dtype,
            kv_dtype=kv_dtype,
        )
