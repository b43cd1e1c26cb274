"""These kernels without a GPU: triton's interpreter runs them on the CPU, in numpy.

Triton decides by an environment variable while it and the kernels are imported; after
that the variable is put back, so that nothing else in the process or started by it sees
it. Where triton has been imported to compile, as by tests/gpu, these tests are skipped.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

import pytest
import torch

_VARIABLE = "TRITON_INTERPRET"


def _import_interpreted() -> str:
    """Empty, or why these tests cannot run."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if "triton" not in sys.modules:
        before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = "1"
        try:
            # The latter it would import when the first kernel runs.
            for name in ("compute.kernels.triton", "triton.experimental.gluon"):
                importlib.import_module(name)
        finally:
            if before is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = before
    from compute.kernels.triton.elements import to_int8

    if type(to_int8).__name__ != "InterpretedFunction":
        return "triton compiles in this process: run this folder in one of its own"
    return ""


_REASON = _import_interpreted()
if _REASON:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> list[str]:
    return [f"triton's interpreter: {_REASON}"] if _REASON else []


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run; tests/gpu has another one."""
    return torch.device("cpu")
