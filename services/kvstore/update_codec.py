"""Messages about a step's update."""

from __future__ import annotations

from quire.kvstore.v1 import kvstore_pb2 as pb

from kvstore import types
from services.common.durations import seconds_of
from services.kvstore import codec, swap_codec


def update(message: pb.UpdateSequencesRequest) -> types.Update:
    """Raises InvalidRequest for a mode of suspension that is none."""
    return types.Update(
        commits=[codec.commit_plan(plan) for plan in message.commits],
        forks=[codec.fork_plan(plan) for plan in message.forks],
        closes=message.closes,
        truncates=[codec.truncate_plan(plan) for plan in message.truncates],
        suspends=[swap_codec.suspend_plan(plan) for plan in message.suspends],
        extends=[codec.extend_plan(plan) for plan in message.extends],
        resumes=message.resumes,
        opens=[codec.open_plan(plan) for plan in message.opens],
        num_spare_blocks=message.spare_block_count,
        runs_copies=message.runs_copies,
        completed_transfer=message.completed_transfer,
        transfer_seconds=seconds_of(message.transfer_duration),
        num_prefill_tokens=message.prefill_token_count,
        prefill_seconds=seconds_of(message.prefill_duration),
    )


def update_result(result: types.UpdateResult) -> pb.UpdateSequencesResponse:
    return pb.UpdateSequencesResponse(
        extended=codec.extended(result.extended),
        opened=codec.opened(result.opened),
        refused=[
            pb.Refusal(
                sequence_id=refusal.sequence_id, reason=refusal.reason, message=refusal.message
            )
            for refusal in result.refused
        ],
        copies=codec.block_copies(result.copies),
        transfer=result.transfer,
        forked=codec.forked(result.forked),
        suspended=swap_codec.suspended_sequences(result.suspended),
        resumed=swap_codec.resumed_sequences(result.resumed),
        available_block_count=result.num_available_blocks,
    )
