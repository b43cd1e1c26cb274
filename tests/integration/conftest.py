"""One running system for all tests that do not disturb it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.running import Running, start_quire


@pytest.fixture(scope="session")
def quire(model_files, tmp_path_factory) -> Iterator[Running]:
    running = start_quire(tmp_path_factory.mktemp("quire") / "log")
    try:
        running.wait_started()
        yield running
    finally:
        assert running.stop() == 0, running.log.read_text()


@pytest.fixture(scope="session")
def quire_url(quire) -> str:
    return quire.url


@pytest.fixture(scope="session")
def quire_grpc(quire) -> str:
    return quire.grpc
