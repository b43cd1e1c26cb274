"""The gateway's step runner: behind gRPC, or a thread in this process."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import grpc
from quire.compute.v1 import compute_pb2 as pb
from quire.compute.v1 import compute_pb2_grpc

from compute import types as ct
from compute.errors import ComputeError, InvalidStep
from compute.ports import StepRunner
from gateway import ports
from gateway.errors import StepRefused, WorkerUnavailable
from services.common.server import CHANNEL_OPTIONS
from services.compute.servicer import ACCEPTED
from services.compute.step_thread import StepSession, StepThread
from services.gateway import compute_codec
from services.gateway.unavailable import unavailable

# Describing a model or accepting a driver may have to wait for a step to end.
_CALL_SECONDS = 30.0

# How long closing waits for the other side's goodbye, which makes the next `open_stream`
# find the driver's seat empty.
_GOODBYE_SECONDS = 2.0

_CLOSED = "compute: the stream is closed"


class GrpcCompute:
    """gateway.ports.Compute over a compute process."""

    def __init__(self, target: str) -> None:
        """`target` is HOST:PORT or unix:PATH. Connects when first used."""
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._stub = compute_pb2_grpc.ComputeServiceStub(self._channel)

    async def get_model(self) -> ports.ModelInfo:
        try:
            response = await self._stub.GetModel(pb.GetModelRequest(), timeout=_CALL_SECONDS)
        except grpc.RpcError as error:
            raise _unavailable(error) from None
        return compute_codec.model(response)

    async def open_stream(self) -> GrpcStepStream:
        call = self._stub.RunSteps()
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                if ACCEPTED not in tuple(await call.initial_metadata() or ()):
                    await call.read()  # raises what the server refused the stream with
                    raise WorkerUnavailable("compute ended the stream")
        except grpc.RpcError as error:
            raise _unavailable(error) from None
        except TimeoutError:
            call.cancel()
            raise WorkerUnavailable("compute does not answer") from None
        except asyncio.CancelledError:  # or our forgotten call would keep the driver's seat
            call.cancel()
            raise
        return GrpcStepStream(call)

    async def close(self) -> None:
        await self._channel.close()


class GrpcStepStream:
    """gateway.ports.StepStream over an open RunSteps call."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self._call = call
        self._is_open = True
        self._num_early: dict[int, int] = {}  # answers of a step before its last, by its id

    async def submit(self, step: ports.Step) -> None:
        if not self._is_open:
            raise WorkerUnavailable(_CLOSED)
        parts = compute_codec.parts(step)
        if len(parts) > 1:
            self._num_early[step.step_id] = len(parts) - 1
        try:
            for part in parts:
                await self._call.write(compute_codec.message(part))
        except grpc.RpcError as error:
            raise _unavailable(error) from None
        except asyncio.InvalidStateError:  # the other side has ended the call
            raise WorkerUnavailable("compute ended the stream") from None

    async def result(self) -> ports.StepResult:
        response = await self._read()
        refusal = response.refusal if response.HasField("refusal") else None
        for _ in range(self._num_early.pop(response.step_id, 0)):
            response = await self._read()
            if refusal is None and response.HasField("refusal"):
                refusal = response.refusal
        if refusal is not None:
            raise _refused(response.step_id, refusal.reason, refusal.message)
        return compute_codec.result(response)

    async def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await self._call.done_writing()
                await self._call.code()
        except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
            pass  # it is gone or busy; cancelling tells it once more
        finally:
            self._call.cancel()

    async def _read(self) -> pb.RunStepsResponse:
        if not self._is_open:
            raise WorkerUnavailable(_CLOSED)
        try:
            response = await self._call.read()
        except grpc.RpcError as error:
            raise _unavailable(error) from None
        except asyncio.CancelledError:
            if self._is_open:
                raise  # we are cancelled, not the call
            raise WorkerUnavailable(_CLOSED) from None
        if response is grpc.aio.EOF:
            raise WorkerUnavailable("compute ended the stream")
        return response


class LocalCompute:
    """gateway.ports.Compute over a runner in a thread of this process.

    The runner stays its maker's to close.
    """

    def __init__(self, runner: StepRunner, executor: ThreadPoolExecutor) -> None:
        """`executor` as in StepThread."""
        self._thread = StepThread(runner, executor)

    async def get_model(self) -> ports.ModelInfo:
        try:
            info, handle = await self._thread.model()
        except ComputeError as error:
            raise WorkerUnavailable(f"compute: {error}") from None
        return compute_codec.local_model(info, handle)

    async def open_stream(self) -> LocalStepStream:
        try:
            return LocalStepStream(await self._thread.open())
        except ComputeError as error:
            raise WorkerUnavailable(f"compute: {error}") from None

    async def close(self) -> None:
        # Waits for the running step, which must not hold up the event loop.
        await asyncio.to_thread(self._thread.close)


class LocalStepStream:
    """gateway.ports.StepStream over a session of the step thread."""

    def __init__(self, session: StepSession) -> None:
        self._session = session
        self._is_open = True
        self._results: asyncio.Queue[tuple[int, asyncio.Future[ct.StepResult]] | None]
        self._results = asyncio.Queue()

    async def submit(self, step: ports.Step) -> None:
        if not self._is_open:
            raise WorkerUnavailable(_CLOSED)
        self._results.put_nowait(
            (step.step_id, self._session.submit(compute_codec.local_step(step)))
        )

    async def result(self) -> ports.StepResult:
        entry = await self._results.get() if self._is_open else None
        if entry is None:
            raise WorkerUnavailable(_CLOSED)
        step_id, future = entry
        try:
            result = await future
        except InvalidStep as error:
            raise _refused(step_id, error.reason, str(error)) from None
        except Exception as error:  # whatever it is, this stream cannot be relied on
            raise WorkerUnavailable(f"compute: {error}") from error
        except asyncio.CancelledError:
            if self._is_open:
                raise  # we are cancelled, not the step
            raise WorkerUnavailable(_CLOSED) from None
        return compute_codec.local_result(result)

    async def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._session.close()
            self._results.put_nowait(None)


def _unavailable(error: grpc.RpcError) -> WorkerUnavailable:
    return unavailable("compute", error)


def _refused(step_id: int, reason: str, message: str) -> StepRefused:
    return StepRefused(f"step {step_id}: {message}", compute_reason=reason)
