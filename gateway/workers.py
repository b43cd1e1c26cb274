"""The kvstore and compute together: both are there, or both count as lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable

from gateway.errors import GatewayError, WorkerUnavailable
from gateway.ports import (
    Compute,
    KvStore,
    ModelInfo,
    PinPlan,
    Step,
    StepResult,
    StepStream,
    Update,
    UpdateResult,
)

# For calls that need no arithmetic.
_CALL_TIMEOUT = 5.0


class Workers:
    """A driver's connection to both workers.

    Every method raises WorkerUnavailable if one of them is out of reach or does not
    answer in time; the caller then disconnects.
    """

    def __init__(self, kv: KvStore, compute: Compute, *, owner: str, step_timeout: float) -> None:
        self._kv, self._compute = kv, compute
        self._step_timeout = step_timeout
        self._owner = owner
        self._stream: StepStream | None = None
        # The kvstore ignores ids that it does not know, so closing one that never
        # was is a harmless way to see that it answers.
        self._probe = Update(closes=(f"{owner}-probe",))

    async def connect(self) -> ModelInfo:
        """Become the driver of both. The kvstore closes what drivers before have left open.

        In this order, because compute may still be writing to those blocks until the
        previous stream has ended.
        """
        # Compute lets the next driver in once the last one's step has ended.
        async with _deadline(self._step_timeout, "compute does not open a stream"):
            self._stream = await self._compute.open_stream()
        async with _deadline(_CALL_TIMEOUT, "the kvstore does not answer"):
            await self._kv.become_driver(self._owner)
        async with _deadline(_CALL_TIMEOUT, "compute does not answer"):
            return await self._compute.get_model()

    async def disconnect(self) -> None:
        """Let go of compute's stream. Never raises; safe to repeat."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(GatewayError):
                async with _deadline(_CALL_TIMEOUT, "the stream does not close"):
                    await stream.close()

    async def close(self) -> None:
        """Let go of both, and of what is open in the kvstore, if that is there."""
        await self.disconnect()
        with contextlib.suppress(GatewayError):
            async with _deadline(_CALL_TIMEOUT, "the kvstore does not answer"):
                await self._kv.resign()
        await self._compute.close()
        await self._kv.close()

    async def probe(self) -> ModelInfo:
        """See that both still answer."""
        async with _deadline(_CALL_TIMEOUT, "the kvstore does not answer"):
            await self._kv.update_sequences(self._probe)
        async with _deadline(_CALL_TIMEOUT, "compute does not answer"):
            return await self._compute.get_model()

    async def pin_prefix(self, plan: PinPlan) -> None:
        """Raises also PinRefused."""
        async with _deadline(_CALL_TIMEOUT, "the kvstore does not answer"):
            await self._kv.pin_prefix(plan)

    async def unpin(self, pin_id: str) -> None:
        async with _deadline(_CALL_TIMEOUT, "the kvstore does not answer"):
            await self._kv.unpin(pin_id)

    async def submit(self, step: Step) -> None:
        """Send a step; its result comes with `exchange`."""
        if self._stream is None:
            raise WorkerUnavailable("no stream to compute is open")
        async with _deadline(self._step_timeout, "compute takes no step"):
            await self._stream.submit(step)

    async def exchange(
        self, update: Update, step: Step | None, meanwhile: Awaitable[None]
    ) -> tuple[UpdateResult | None, StepResult | None]:
        """Make the update and await the step's result, with `meanwhile` beside them.

        An empty update is not sent.
        """
        tasks = (
            asyncio.ensure_future(self._update(update)),
            asyncio.ensure_future(meanwhile),
            asyncio.ensure_future(self._result(step)),
        )
        try:
            async with asyncio.timeout(self._step_timeout):
                changes, _, result = await asyncio.gather(*tasks)
                return changes, result
        except TimeoutError:
            late = "the kvstore" if tasks[0].cancelled() else "compute"
            raise _overdue(f"{late} is overdue with a step", self._step_timeout) from None
        finally:
            for task in tasks:
                task.cancel()

    async def _update(self, update: Update) -> UpdateResult | None:
        return await self._kv.update_sequences(update) if update else None

    async def _result(self, step: Step | None) -> StepResult | None:
        if step is None or self._stream is None:
            return None
        result = await self._stream.result()
        if result.step_id != step.step_id:
            raise WorkerUnavailable(f"step {result.step_id} came back for step {step.step_id}")
        return result


@contextlib.asynccontextmanager
async def _deadline(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise _overdue(what, seconds) from None


def _overdue(what: str, seconds: float) -> WorkerUnavailable:
    return WorkerUnavailable(f"{what}: nothing for {seconds:g} s")
