"""What compute needs from outside."""

from __future__ import annotations

from typing import Protocol

from compute.types import KvShape, PoolHandle


class PoolProvider(Protocol):
    """Whoever owns the page pool."""

    def attach_pool(self, shape: KvShape) -> PoolHandle:
        """The pool for KV of this shape; the same handle until the pool is replaced.

        Raises PoolUnavailable (compute.errors) with the provider's reason if there is none.
        """
