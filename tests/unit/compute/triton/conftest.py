"""These kernels without a GPU: Triton's interpreter runs them on the CPU, in numpy."""

from __future__ import annotations

import pytest
import torch

from compute.kernels.triton.elements import to_int8


@pytest.fixture(scope="session", autouse=True)
def interpreted() -> None:
    """tests/conftest.py sees to it where there is no GPU; where there is one, the same tests
    run on it (tests/gpu)."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: see tests/gpu")
    assert type(to_int8).__name__ == "InterpretedFunction", "Triton compiles in this process"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run; tests/gpu has another one."""
    return torch.device("cpu")
