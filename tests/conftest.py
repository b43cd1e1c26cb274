"""Fixtures for all tests: the real model's files, fetched once; and Triton's interpreter.

Where there is no GPU, Triton's kernels run in its interpreter. It decides by an environment
variable while it and the kernels are imported, and transformers imports it too: so it is
imported here, before all tests. The variable is put back, so that no process that a test
starts sees it.
"""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from services.common import config, model_files

_VARIABLE = "TRITON_INTERPRET"


def _import_interpreted_triton() -> None:
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


if not torch.cuda.is_available():
    _import_interpreted_triton()


@pytest.fixture(scope="session")
def model_files_cache():
    return config.ModelSettings().cache_dir


@pytest.fixture(scope="session", name="model_files")
def real_model_files(model_files_cache) -> model_files.ModelFiles:
    """SmolLM2-135M-Instruct: .model_id, .directory (tokenizer, config), .weights (GGUF)."""
    return model_files.find(config.DEFAULT_MODEL, model_files_cache, lambda *_: None)
