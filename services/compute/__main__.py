"""The compute binary: `quire serve-compute`."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import Any

from quire.compute.v1 import compute_pb2, compute_pb2_grpc

from services.common import binary, config
from services.common.server import GrpcServer, stop_signal
from services.common.startup import StartupReport
from services.compute import worker
from services.compute.pool_provider import GrpcPoolProvider
from services.compute.servicer import ComputeServicer
from services.compute.step_thread import StepThread, new_executor

# Of threads that start from here on. The grammar library recurses, and grammars were tried
# with far less where they came in.
_STACK_BYTES = 16 * 2**20

_SERVICE = compute_pb2.DESCRIPTOR.services_by_name["ComputeService"].full_name


async def serve(settings: config.ComputeSettings, report: StartupReport) -> None:
    """Listen at once, refuse calls with LOADING, and serve when the model is there."""
    stopped = stop_signal()
    servicer = ComputeServicer()
    server = GrpcServer(
        settings.listen,
        [_SERVICE],
        lambda grpc_server: compute_pb2_grpc.add_ComputeServiceServicer_to_server(
            servicer, grpc_server
        ),
    )
    provider = GrpcPoolProvider(settings.kvstore)
    stopping = asyncio.create_task(stopped.wait())
    try:
        await server.start()
        executor = new_executor()
        loading = asyncio.wrap_future(
            executor.submit(worker.load, settings, provider, report.progress)
        )
        first: set[asyncio.Future[Any]] = {loading, stopping}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            # A thread cannot be cancelled; it has done nothing yet that others could see.
            os._exit(0)
        thread = StepThread(loading.result(), executor)
        servicer.serve(thread)
        await server.set_serving(True)
        report.ready(listen=settings.listen, model=settings.model)
        await stopped.wait()
        await server.stop(grace=1.0)
        await asyncio.to_thread(thread.close)
    finally:
        stopping.cancel()
        await server.stop(grace=0)
        provider.close()


def main(arguments: list[str]) -> int:
    threading.stack_size(_STACK_BYTES)
    settings = config.load(config.ComputeSettings, "serve-compute", arguments)
    return binary.run("compute", settings, serve)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
