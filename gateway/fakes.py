"""Workers for tests: small, honest, and predictable."""

from gateway.fake_compute import FakeCompute, FakeStream, expected_candidates, expected_tokens
from gateway.fake_kvstore import ContractBroken, FakeKvStore

__all__ = [
    "ContractBroken",
    "FakeCompute",
    "FakeKvStore",
    "FakeStream",
    "expected_candidates",
    "expected_tokens",
]
