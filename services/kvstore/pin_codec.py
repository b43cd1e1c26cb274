"""Messages about pins."""

from __future__ import annotations

from quire.kvstore.v1 import kvstore_pb2 as pb

from kvstore import types
from kvstore.errors import InvalidRequest
from services.common.durations import duration, seconds_of
from services.kvstore.codec import namespace


def pin_plan(message: pb.PinPrefixRequest) -> types.PinPlan:
    """Raises InvalidRequest unless the message says what to keep."""
    kind = message.WhichOneof("prefix")
    if kind is None:
        raise InvalidRequest("prefix", "neither tokens nor a sequence are given")
    has_tokens = kind == "tokens"
    return types.PinPlan(
        pin_id=message.pin_id,
        owner=message.owner,
        ttl_seconds=seconds_of(message.ttl),
        namespace=namespace(message.tokens.namespace) if has_tokens else None,
        token_ids=message.tokens.token_ids if has_tokens else (),
        sequence_id=message.sequence_id,
        priority=message.priority,
    )


def pin_info(pin: types.PinInfo) -> pb.PinInfo:
    return pb.PinInfo(
        pin_id=pin.pin_id,
        owner=pin.owner,
        tenant=pin.tenant,
        priority=pin.priority,
        ttl=duration(pin.ttl_seconds),
        token_count=pin.num_tokens,
        cached_token_count=pin.num_cached_tokens,
    )
