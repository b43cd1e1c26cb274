"""What options may say: sizes, shares, addresses, devices, limits of tenants.

Each is a text that is checked when it is read, and parsed by whoever uses it.
"""

from __future__ import annotations

import re
from typing import Annotated

import psutil
from pydantic import AfterValidator, BeforeValidator

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def memory_bytes(text: str) -> int:
    """Bytes of a size such as 1073741824, 1GiB, 500MB, or of a share such as 25%.

    A share is of the machine's physical memory, which does not change while others
    come and go; free memory would.
    """
    number, unit = _size_parts(text)
    if unit == "%":
        return int(psutil.virtual_memory().total * number / 100)
    return int(number * _UNITS[unit])


def memory_share(text: str) -> float:
    """The share, up to 1, that a size such as 25% names; 0: it is no share."""
    number, unit = _size_parts(text)
    return number / 100 if unit == "%" else 0.0


def _size_parts(text: str) -> tuple[float, str]:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z%]*)\s*", text)
    if match is None or match[2].lower() not in {*_UNITS, "%"}:
        raise ValueError(f"{text!r} is not a size such as 1GiB, 500MB or 25%")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%" and number > 100:
        raise ValueError(f"{text!r} is more than all of the memory")
    return number, unit


def _check_size(text: str) -> str:
    if memory_bytes(text) <= 0:
        raise ValueError("must be above zero")
    return text


def _check_size_or_none(text: str) -> str:
    memory_bytes(text)
    return text


def tenant_limits(text: str) -> dict[str, tuple[int, int | None]]:
    """Floor and quota of each tenant in NAME=FLOOR:QUOTA,…; either number may be left out."""
    limits = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(?P<name>[^=,]+)=(?P<floor>[0-9]*)(?::(?P<quota>[0-9]*))?", part)
        if match is None:
            raise ValueError(f"{part!r} is not NAME=FLOOR:QUOTA")
        floor, quota = int(match["floor"] or 0), match["quota"]
        most = int(quota) if quota else None
        if match["name"] in limits:
            raise ValueError(f"{match['name']!r} is listed twice")
        if most is not None and most < max(1, floor):
            raise ValueError(f"{part!r}: the quota is below the floor, or 0")
        limits[match["name"]] = (floor, most)
    return limits


def _check_tenants(text: str) -> str:
    tenant_limits(text)
    return text


def device_number(text: str) -> int | None:
    """Number of the CUDA device that `cuda` or `cuda:N` names; None: `cpu`."""
    match = re.fullmatch(r"cpu|cuda(?::([0-9]{1,4}))?", text)
    if match is None:
        raise ValueError(f"{text!r} is not cpu, cuda or cuda:N")
    return None if text == "cpu" else int(match[1] or 0)


def _check_device(text: str) -> str:
    device_number(text)
    return text


def _size_text(value: object) -> object:
    # A TOML file may have a number of bytes as a number.
    return str(value) if type(value) is int else value


def _check_host_port(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return text


def _check_listen(text: str) -> str:
    return text if text.startswith("unix:") and len(text) > 5 else _check_host_port(text)


def _check_block_size(value: int) -> int:
    if value not in (8, 16, 32):
        raise ValueError("must be 8, 16 or 32")
    return value


BlockSize = Annotated[int, AfterValidator(_check_block_size)]
HostMemorySize = Annotated[str, BeforeValidator(_size_text), AfterValidator(_check_size_or_none)]
Tenants = Annotated[str, AfterValidator(_check_tenants)]
MemorySize = Annotated[str, BeforeValidator(_size_text), AfterValidator(_check_size)]
HostPort = Annotated[str, AfterValidator(_check_host_port)]
ListenAddress = Annotated[str, AfterValidator(_check_listen)]
Device = Annotated[str, AfterValidator(_check_device)]
