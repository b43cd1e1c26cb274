"""GenerationService: decode, call, encode. Errors are raised as they come."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager

import grpc
import structlog
from quire.gateway.v1 import gateway_pb2 as pb
from quire.gateway.v1 import gateway_pb2_grpc as pb_grpc

from gateway.errors import InvalidField
from services.common.errors import status_of
from services.gateway import codec
from services.gateway.frontend import Frontend

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


_log = structlog.get_logger()


class GenerationServicer(pb_grpc.GenerationServiceServicer):
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def Generate(  # noqa: N802 - names of the contract
        self, request: pb.GenerateRequest, _context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """A cancelled call ends in here with CancelledError, which closes the events."""
        request_id = codec.request_id(request.request_id)
        name, frontend = request.model, self._frontend
        with _reported("Generate", request_id), codec.wire_names(request):
            codec.refuse_long_lists(request)
            codec.refuse_unknown_fields(request)
            model = frontend.model(name) if name else frontend.default_model()
            session = codec.session(request)
            prompt_ids = await self._prompt_ids(request)
            grammar = await frontend.compile_grammar(codec.structure(request))
            generation = codec.generation_request(request, request_id, prompt_ids, grammar)
            async with aclosing(frontend.generate(generation, session)) as events:
                async for event in events:
                    for response in codec.generate_responses(
                        event, model.model_id, frontend.token_bytes
                    ):
                        yield response

    async def _prompt_ids(self, request: pb.GenerateRequest) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind == "text":
            self._frontend.check_texts([request.text])
            if request.session.source_id:
                return await self._frontend.tokenize_continuation(request.text)
            [token_ids] = await self._frontend.tokenize([request.text])
            return token_ids
        if kind == "token_ids":
            return list(request.token_ids.ids)
        if kind == "chat":
            conversation = codec.conversation(request.chat)
            self._frontend.check_conversation(conversation)
            return await self._frontend.tokenize_chat(conversation)
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
        if not request.request_id:
            raise InvalidField("request_id", "request_id: it is empty")
        self._frontend.cancel(request.request_id)
        return pb.CancelGenerationResponse()


@contextmanager
def _reported(method: str, request_id: str) -> Iterator[None]:
    """One line in the log when a call has ended, as REST requests have."""
    began, status = time.monotonic(), "CANCELLED"  # unless it ends by itself
    try:
        yield
        status = "OK"
    except Exception as error:
        status = status_of(error).code.name
        raise
    finally:
        seconds = round(time.monotonic() - began, 4)
        _log.info("request", method=method, request_id=request_id, status=status, seconds=seconds)
