"""GenerationService: decode, call, encode. Errors are raised as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
from quire.gateway.v1 import gateway_pb2 as pb
from quire.gateway.v1 import gateway_pb2_grpc as pb_grpc

from gateway.errors import InvalidField
from services.gateway import codec
from services.gateway.frontend import Frontend

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


class GenerationServicer(pb_grpc.GenerationServiceServicer):
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def Generate(  # noqa: N802 - names of the contract
        self, request: pb.GenerateRequest, _context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """A cancelled call ends in here with CancelledError, which closes the events."""
        name, frontend = request.model, self._frontend
        model = frontend.model(name) if name else frontend.default_model()
        with codec.wire_names(request):
            prompt_ids = await self._prompt_ids(request)
            generation = codec.generation_request(request, prompt_ids)
            async with aclosing(frontend.generate(generation)) as events:
                async for event in events:
                    yield codec.generate_response(event, model.model_id)

    async def _prompt_ids(self, request: pb.GenerateRequest) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind == "text":
            [token_ids] = await self._frontend.tokenize([request.text])
            return token_ids
        if kind == "token_ids":
            return list(request.token_ids.ids)
        if kind == "chat":
            return await self._frontend.tokenize_chat(codec.conversation(request.chat))
        raise InvalidField("prompt", "prompt: one of text, token_ids and chat is needed")

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, _context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        with codec.wire_names(request):
            return pb.TokenizeResponse(token_ids=await self._input_ids(request))

    async def _input_ids(self, request: pb.TokenizeRequest) -> list[int]:
        kind = request.WhichOneof("input")
        if kind == "text":
            [token_ids] = await self._frontend.tokenize([request.text])
            return token_ids
        if kind == "chat":
            return await self._frontend.tokenize_chat(codec.conversation(request.chat))
        raise InvalidField("input", "input: one of text and chat is needed")

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, _context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text=self._frontend.detokenize(request.token_ids))

    async def ListModels(  # noqa: N802
        self, _request: pb.ListModelsRequest, _context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        return codec.list_models_response(self._frontend.models())

    async def CancelGeneration(  # noqa: N802
        self, request: pb.CancelGenerationRequest, _context: grpc.aio.ServicerContext
    ) -> pb.CancelGenerationResponse:
        self._frontend.cancel(request.request_id)
        return pb.CancelGenerationResponse()
