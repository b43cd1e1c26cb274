"""What tests of GenerationService do with its calls."""

from __future__ import annotations

import grpc
import pytest
from quire.gateway.v1 import gateway_pb2 as pb

from services.common.errors import error_details


def chat(*messages):
    return pb.ChatMessages(messages=[pb.ChatMessage(role=r, content=c) for r, c in messages])


async def events_of(call):
    return [event async for event in call]


async def refusal_of(call):
    with pytest.raises(grpc.RpcError) as raised:
        await (events_of(call) if hasattr(call, "__aiter__") else call)
    return error_details(raised.value)
