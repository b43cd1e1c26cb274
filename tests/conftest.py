"""Fixtures for all tests: the real model's files, fetched once."""

from __future__ import annotations

import pytest

from services.common import config, model_files


@pytest.fixture(scope="session")
def model_files_cache():
    return config.ModelSettings().cache_dir


@pytest.fixture(scope="session", name="model_files")
def real_model_files(model_files_cache) -> model_files.ModelFiles:
    """SmolLM2-135M-Instruct: .model_id, .directory (tokenizer, config), .weights (GGUF)."""
    return model_files.find(config.DEFAULT_MODEL, model_files_cache, lambda *_: None)
