"""What compute needs from outside."""

from __future__ import annotations

from typing import Protocol

from compute.types import KvShape, ModelInfo, PoolHandle, Step, StepResult


class PoolProvider(Protocol):
    """Whoever owns the page pool."""

    def attach_pool(self, shape: KvShape) -> PoolHandle:
        """The pool for KV of this shape; the same handle until the pool is replaced.

        Raises PoolUnavailable (compute.errors) with the provider's reason if there is none.
        """


class StepRunner(Protocol):
    """What runs steps, for whoever serves it. One thread at a time may call it."""

    def info(self) -> ModelInfo:
        """The loaded model."""

    def handle(self) -> PoolHandle:
        """The attached pool."""

    def run(self, step: Step) -> StepResult:
        """Run one step. What a single sequence cannot do is a failure in the result.

        Raises InvalidStep (compute.errors), with the sequences as before.
        """

    def reset(self) -> None:
        """Forget all sequences."""

    def refresh_pool(self) -> None:
        """Attach the provider's present pool if it is another one than ours.

        Raises PoolUnavailable or LayoutMismatch; the old pool stays attached, unless its
        memory has ended with the process that it was from.
        """
