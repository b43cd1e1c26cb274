"""Asking a running kvstore, for commands that show what is in it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import grpc
from quire.kvstore.v1 import kvstore_pb2 as pb
from quire.kvstore.v1 import kvstore_pb2_grpc

from kvstore.types import PoolStats
from services.cli.printable import one_line
from services.cli.runtime_folder import running_folders
from services.common import pool_stats
from services.common.config import DEFAULT_KVSTORE
from services.common.errors import error_details
from services.common.server import CHANNEL_OPTIONS
from services.common.startup import StartupError

_CALL_SECONDS = 5.0
# An audit of a large pool takes its time.
_AUDIT_SECONDS = 120.0


class KvStoreSilent(StartupError):
    """The kvstore does not answer, or refuses. The text is one line."""


def address_of(given: str) -> str:
    """The address that was given, else that of the latest `quire up`, else the default."""
    if given:
        return given
    for folder in running_folders():
        return f"unix:{folder / 'kvstore.sock'}"
    return DEFAULT_KVSTORE


class KvStoreClient:
    """One kvstore. Every call raises KvStoreSilent if it does not answer."""

    def __init__(self, given: str) -> None:
        """`given`: HOST:PORT or unix:PATH; empty: whichever runs here."""
        self.address = address_of(given)
        self._channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self._stub = kvstore_pb2_grpc.KvCacheServiceStub(self._channel)

    def stats(self) -> PoolStats:
        """The pool's counters; all 0 while there is no pool."""
        return pool_stats.from_message(self._call(self._stub.GetStats, pb.GetStatsRequest()))

    def audit(self, *, repair: bool) -> pb.AuditPoolResponse:
        request = pb.AuditPoolRequest(repair=repair)
        response: pb.AuditPoolResponse = self._call(self._stub.AuditPool, request, _AUDIT_SECONDS)
        return response

    def pins(self) -> list[pb.PinInfo]:
        """All of them, oldest first."""
        return list(self._call(self._stub.ListPins, pb.ListPinsRequest()).pins)

    def sequences(self, most: int) -> list[pb.SequenceInfo]:
        """The oldest open sequences, so many at most."""
        request = pb.ListSequencesRequest(page_size=most)
        return list(self._call(self._stub.ListSequences, request).sequences)

    def _call(self, method: Any, request: Any, seconds: float = _CALL_SECONDS) -> Any:
        try:
            return method(request, timeout=seconds)
        except grpc.RpcError as error:
            text = one_line(error.details() or error.code().name)
            if error_details(error).reason:  # it is there, and says what is wrong
                raise KvStoreSilent(f"the kvstore at {self.address}: {text}") from None
            raise KvStoreSilent(
                f"the kvstore at {self.address} does not answer ({text}); start one with "
                "`quire up`, or name it with --kvstore"
            ) from None

    def __enter__(self) -> KvStoreClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()
