"""One running system for all tests that do not disturb it."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import openai
import pytest
from quire.gateway.v1 import gateway_pb2_grpc as pb_grpc

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


@pytest.fixture
def client(quire_url):
    with openai.OpenAI(base_url=f"{quire_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def model(client):
    return client.models.list().data[0].id


@pytest.fixture
def channel(quire_grpc):
    with grpc.insecure_channel(quire_grpc) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return pb_grpc.GenerationServiceStub(channel)
