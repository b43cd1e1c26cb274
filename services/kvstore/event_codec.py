"""From a pool's events to messages of quire.kvstore.v1."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from quire.kvstore.v1 import kvstore_pb2 as pb

from kvstore import events
from kvstore.content_keys import split_keys
from kvstore.key_table import PoolSnapshot

# Blocks in one part of a snapshot. Keys, ids and 32 tokens take 245 bytes at most, so that
# a part stays below 4 MiB, and encoding one does not hold up the event loop for long.
_BLOCKS_PER_PART = 4096

_CAUSES = {
    events.EvictionCause.ROOM: pb.EVICTION_CAUSE_ROOM,
    events.EvictionCause.QUOTA: pb.EVICTION_CAUSE_QUOTA,
    events.EvictionCause.PREFIX: pb.EVICTION_CAUSE_PREFIX,
    events.EvictionCause.MOVED: pb.EVICTION_CAUSE_MOVED,
}


def snapshot_parts(
    epoch: int, block_size: int, snapshot: PoolSnapshot
) -> Iterator[pb.WatchPoolEventsResponse]:
    """The messages of a snapshot, at least one."""
    count = len(snapshot.block_ids)
    for first in range(0, max(count, 1), _BLOCKS_PER_PART):
        rows = slice(first, first + _BLOCKS_PER_PART)
        tokens = () if snapshot.tokens is None else snapshot.tokens[rows].ravel().tolist()
        part = pb.PoolSnapshot(
            keys=split_keys(snapshot.keys[rows].tobytes()),
            parent_keys=split_keys(snapshot.parent_keys[rows].tobytes()),
            block_ids=snapshot.block_ids[rows].tolist(),
            block_size=block_size,
            token_ids=tokens,
            is_last=rows.stop >= count,
        )
        yield pb.WatchPoolEventsResponse(epoch=epoch, number=snapshot.number, snapshot=part)


def pool_event(
    epoch: int, block_size: int, event: events.PoolEvent, include_token_ids: bool
) -> pb.WatchPoolEventsResponse:
    message = pb.WatchPoolEventsResponse(epoch=epoch, number=event.number)
    match event:
        case events.BlocksStored():
            tokens = np.frombuffer(event.token_data, np.int32) if include_token_ids else ()
            stored = pb.BlocksStored(
                parent_key=event.parent_key,
                keys=split_keys(event.keys),
                block_ids=event.block_ids,
                block_size=block_size,
                token_ids=tokens,
            )
            message.stored.CopyFrom(stored)
        case events.BlocksEvicted():
            message.evicted.keys.extend(split_keys(event.keys))
            message.evicted.cause = _CAUSES[event.cause]
        case events.PoolCleared():
            message.cleared.SetInParent()
    return message
