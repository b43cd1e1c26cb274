"""The one thread that runs steps, and the one driver that may feed it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor

from compute.errors import DriverBusy
from compute.ports import StepRunner
from compute.types import ModelInfo, PoolHandle, Step, StepResult


def new_executor() -> ThreadPoolExecutor:
    """One thread for all arithmetic of a runner: to load its model, then to run its steps.

    A second thread would start a second OpenMP team. With more threads than cores the
    runtime stops spinning between kernels, which makes a decode step half as long again.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")


class StepThread:
    """Keeps a StepRunner's work off the event loop, in the order it was asked for.

    States: idle, driven (between `open` and the session's `close`), closed. Owned by one
    event loop.
    """

    def __init__(self, runner: StepRunner, executor: ThreadPoolExecutor) -> None:
        """`executor` is the one that loaded the runner; it is ours from now on."""
        self._runner = runner
        self._executor = executor
        self._driver: StepSession | None = None

    async def model(self) -> tuple[ModelInfo, PoolHandle]:
        """The model and its pool; the present pool, unless a driver relies on ours.

        Raises PoolUnavailable or LayoutMismatch (compute.errors).
        """
        if self._driver is None:
            await self._in_thread_refresh()
        return self._runner.info(), self._runner.handle()

    async def open(self) -> StepSession:
        """Become the driver.

        Raises:
            DriverBusy: there is another one.
            PoolUnavailable, LayoutMismatch: the present pool cannot be attached.
        """
        if self._driver is not None:
            raise DriverBusy("another driver's stream is open, and there is one at a time")
        session = self._driver = StepSession(self)
        try:
            await self._in_thread_refresh()
        except BaseException:
            session.close()
            raise
        return session

    def close(self) -> None:
        """Drop what is queued and wait for the step that is running. Safe to repeat."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def submit(self, step: Step) -> Future[StepResult]:
        return self._executor.submit(self._runner.run, step)

    def leave(self, session: StepSession) -> None:
        """The session is over. What the next one asks for runs after our reset."""
        if self._driver is not session:
            return
        self._driver = None
        try:
            self._executor.submit(self._runner.reset)
        except RuntimeError:  # closed: nobody can see the sequences any more
            return

    async def _in_thread_refresh(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._runner.refresh_pool)


class StepSession:
    """The driver's turn. Its sequences are forgotten when it closes."""

    def __init__(self, thread: StepThread) -> None:
        self._thread = thread
        self._pending: dict[asyncio.Future[StepResult], Future[StepResult]] = {}
        self._is_open = True

    def submit(self, step: Step) -> asyncio.Future[StepResult]:
        """Queue a step. The future has the result, or the error that `run` raised."""
        if not self._is_open:
            raise RuntimeError("the session is closed")
        queued = self._thread.submit(step)
        result = asyncio.wrap_future(queued)
        self._pending[result] = queued
        result.add_done_callback(self._finished)
        return result

    def close(self) -> None:
        """Drop the queued steps; the running one ends in its own time. Safe to repeat."""
        if not self._is_open:
            return
        self._is_open = False
        for result, queued in tuple(self._pending.items()):
            # The queue's own entry first: the loop would pass our cancelling on too late
            # to stop a step that is about to start.
            queued.cancel()
            result.cancel()
        self._thread.leave(self)

    def _finished(self, result: asyncio.Future[StepResult]) -> None:
        self._pending.pop(result, None)
        if not result.cancelled():
            # Marks it as seen: whoever was to read it may be gone.
            result.exception()
