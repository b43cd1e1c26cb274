"""The wire's element types and the domains' names for them."""

from __future__ import annotations

from quire.common.v1 import common_pb2

_NAMES = {
    common_pb2.DTYPE_FLOAT32: "float32",
    common_pb2.DTYPE_BFLOAT16: "bfloat16",
    common_pb2.DTYPE_FLOAT16: "float16",
    common_pb2.DTYPE_FP8_E4M3: "fp8_e4m3",
    common_pb2.DTYPE_INT8: "int8",
}
_NUMBERS = {name: number for number, name in _NAMES.items()}


def dtype_name(number: common_pb2.Dtype) -> str:
    """The name of a type; for one we do not know a text that no domain accepts."""
    return _NAMES.get(number, f"dtype {int(number)}")


def dtype_number(name: str) -> common_pb2.Dtype:
    """The number of a type; DTYPE_UNSPECIFIED, which servers refuse, if there is none."""
    return _NUMBERS.get(name, common_pb2.DTYPE_UNSPECIFIED)
