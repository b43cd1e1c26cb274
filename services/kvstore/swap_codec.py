"""Messages about suspended sequences."""

from __future__ import annotations

from collections.abc import Iterable

from quire.kvstore.v1 import kvstore_pb2 as pb

from kvstore import types
from kvstore.errors import InvalidRequest
from services.common.durations import duration
from services.kvstore.codec import block_copies

_MODES = {
    pb.SUSPEND_MODE_UNSPECIFIED: types.SuspendMode.AUTO,
    pb.SUSPEND_MODE_AUTO: types.SuspendMode.AUTO,
    pb.SUSPEND_MODE_SWAP: types.SuspendMode.SWAP,
    pb.SUSPEND_MODE_RECOMPUTE: types.SuspendMode.RECOMPUTE,
}
_NUMBERS = {mode: number for number, mode in _MODES.items()}


def suspend_plan(message: pb.SuspendPlan) -> types.SuspendPlan:
    """Raises InvalidRequest for a mode that is none."""
    mode = _MODES.get(message.mode)
    if mode is None:
        raise InvalidRequest("mode", f"{message.mode} is no mode")
    return types.SuspendPlan(message.sequence_id, mode)


def suspended_sequences(
    sequences: Iterable[types.SuspendedSequence],
) -> list[pb.SuspendedSequence]:
    return [
        pb.SuspendedSequence(
            sequence_id=one.sequence_id,
            mode=_NUMBERS[one.mode],
            reason=one.reason,
            swap_duration=duration(one.swap_seconds),
            recompute_duration=duration(one.recompute_seconds),
            copied_block_count=one.num_copied_blocks,
            freed_block_count=one.num_freed_blocks,
        )
        for one in sequences
    ]


def resumed_sequences(sequences: Iterable[types.ResumedSequence]) -> list[pb.ResumedSequence]:
    return [
        pb.ResumedSequence(
            sequence_id=one.sequence_id,
            block_ids=one.block_ids,
            length=one.length,
            computed_token_count=one.num_computed_tokens,
            copies=block_copies(one.copies),
        )
        for one in sequences
    ]


def suspended(
    sequences: list[types.SuspendedSequence], copies: list[types.BlockCopy], transfer: int
) -> pb.SuspendSequencesResponse:
    return pb.SuspendSequencesResponse(
        sequences=suspended_sequences(sequences),
        copies=block_copies(copies),
        transfer=transfer,
    )


def resumed(
    sequences: list[types.ResumedSequence], copies: list[types.BlockCopy], transfer: int
) -> pb.ResumeSequencesResponse:
    return pb.ResumeSequencesResponse(
        sequences=resumed_sequences(sequences),
        copies=block_copies(copies),
        transfer=transfer,
    )
