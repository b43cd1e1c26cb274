"""The gateway binary: `quire serve-gateway`."""

from __future__ import annotations

import asyncio
import sys

from quire.gateway.v1 import gateway_pb2, gateway_pb2_grpc

from gateway.engine import Engine, EngineSettings
from gateway.limits import Limits
from gateway.speculation import SpeculationMethod
from gateway.tokenizer import Tokenizer
from services.common import binary, config, model_files
from services.common.server import GrpcServer, stop_signal
from services.common.startup import StartupReport
from services.gateway.compute_clients import GrpcCompute
from services.gateway.frontend import Frontend
from services.gateway.kvstore_clients import GrpcKvStore
from services.gateway.metrics import Metrics
from services.gateway.rest.app import create_app
from services.gateway.rest.server import RestServer
from services.gateway.servicer import GenerationServicer

_SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
_READY_INTERVAL = 0.1


def engine_settings(settings: config.ApiSettings) -> EngineSettings:
    return EngineSettings(
        limits=Limits(
            token_budget=settings.token_budget,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            step_target=settings.step_target,
            ageing=settings.ageing,
            watermark=settings.watermark,
            speculation=SpeculationMethod(settings.speculation),
            num_drafts=settings.num_drafts,
        ),
        step_timeout=settings.step_timeout,
        drain_timeout=settings.drain_timeout,
        queue_timeout=settings.queue_timeout,
    )


async def serve(settings: config.GatewaySettings, report: StartupReport) -> None:
    """Listen at once; not ready until the workers are there, and whenever they are not."""
    stopped = stop_signal()
    found = model_files.find(settings.model, settings.cache_dir, report.progress)
    kv, compute = GrpcKvStore(settings.kvstore), GrpcCompute(settings.compute)
    engine = Engine(kv, compute, Tokenizer.load(found.directory), engine_settings(settings))
    frontend = Frontend(engine, Metrics(kv.get_stats))
    rest = RestServer(create_app(frontend, max_body_bytes=settings.max_body_bytes), settings.http)
    server = GrpcServer(
        settings.grpc,
        [_SERVICE],
        lambda grpc_server: gateway_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(frontend), grpc_server
        ),
    )
    try:
        await rest.start()
        await server.start()
        await engine.start()
        report.progress("wait for the workers", 0, 1)
        health = asyncio.create_task(_follow_readiness(engine, server, report, settings))
        await stopped.wait()
        health.cancel()
        await server.set_serving(False)
        # New requests are refused from here on; running ones get the time to end.
        await engine.stop()
        await frontend.close()
    finally:
        await asyncio.gather(rest.stop(grace=1.0), server.stop(grace=1.0))


async def _follow_readiness(
    engine: Engine, server: GrpcServer, report: StartupReport, settings: config.GatewaySettings
) -> None:
    """Keep `grpc.health.v1` as true as /health/ready; report the first time."""
    reported, serving = False, False
    while True:
        if engine.is_ready() != serving:
            serving = not serving
            await server.set_serving(serving)
            if serving and not reported:
                reported = True
                report.ready(http=settings.http, grpc=settings.grpc)
        await asyncio.sleep(_READY_INTERVAL)


def main(arguments: list[str]) -> int:
    settings = config.load(config.GatewaySettings, "serve-gateway", arguments)
    return binary.run("gateway", settings, serve)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
