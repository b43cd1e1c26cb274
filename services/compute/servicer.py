"""ComputeService over the step thread: decode, call, encode."""

# Names and signatures are those of the generated base class.
# ruff: noqa: ARG002, N802

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import structlog
from quire.compute.v1 import compute_pb2 as pb
from quire.compute.v1 import compute_pb2_grpc

from compute.errors import InvalidStep, ModelLoading
from compute.types import StepResult
from services.compute import codec
from services.compute.step_thread import StepSession, StepThread

# Steps that a driver may have sent ahead. Beyond them the transport holds it back.
_MAX_QUEUED_STEPS = 16

# Initial metadata of a stream whose sender is the driver now.
ACCEPTED = ("quire-stream", "accepted")

_Answers = asyncio.Queue[tuple[int, asyncio.Future[StepResult]] | None]

_log = structlog.get_logger()


class ComputeServicer(compute_pb2_grpc.ComputeServiceServicer):
    """Refuses calls with LOADING until `serve` gives it a step thread.

    Errors of the domain are raised as they are; the interceptor gives them a status.
    """

    def __init__(self) -> None:
        self._thread: StepThread | None = None

    def serve(self, thread: StepThread) -> None:
        self._thread = thread

    async def GetModel(
        self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelResponse:
        return codec.model(*await self._steps().model())

    async def RunSteps(
        self, request_iterator: AsyncIterator[pb.RunStepsRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.RunStepsResponse]:
        session = await self._steps().open()
        answers: _Answers = asyncio.Queue(_MAX_QUEUED_STEPS)
        reader: asyncio.Task[None] | None = None
        try:
            await context.send_initial_metadata((ACCEPTED,))
            reader = asyncio.create_task(_read(request_iterator, session, answers))
            while (answer := await answers.get()) is not None:
                yield await _response(*answer)
        finally:
            if reader is not None:
                reader.cancel()
            session.close()

    def _steps(self) -> StepThread:
        if self._thread is None:
            raise ModelLoading("the model is still loading")
        return self._thread


async def _read(
    requests: AsyncIterator[pb.RunStepsRequest], session: StepSession, answers: _Answers
) -> None:
    """Queue every step as it arrives; None at the end of the stream."""
    try:
        async for request in requests:
            for state in request.sequences:
                _log.info(
                    "sequence received",
                    request_id=state.request_id,
                    sequence_id=state.sequence_id,
                    num_tokens=len(state.token_ids),
                    step_id=request.step_id,
                )
            await answers.put((request.step_id, session.submit(codec.step(request))))
    except Exception:
        await answers.put(None)
        raise
    await answers.put(None)


async def _response(step_id: int, result: asyncio.Future[StepResult]) -> pb.RunStepsResponse:
    try:
        return codec.step_result(await result)
    except InvalidStep as error:
        return codec.refused(step_id, error)
