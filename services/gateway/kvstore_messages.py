"""Between gateway.ports and the messages of a kvstore."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from quire.common.v1 import common_pb2
from quire.kvstore.v1 import kvstore_pb2 as pb

from gateway import ports
from services.common.durations import duration

# Prompt tokens in one message: at most 5 bytes each, and well below 4 MiB in all.
_MAX_PROMPT_TOKENS = 400_000


def update(its: ports.Update, opens: Sequence[ports.OpenPlan]) -> pb.UpdateSequencesRequest:
    """With these of its openings."""
    return pb.UpdateSequencesRequest(
        commits=[
            pb.CommitPlan(
                sequence_id=sequence_id,
                computed_token_count=num_computed,
                token_start=start,
                token_ids=token_ids,
            )
            for sequence_id, num_computed, start, token_ids in its.commits
        ],
        forks=[
            pb.ForkPlan(sequence_id=sequence_id, source_sequence_id=source_id, length=length)
            for sequence_id, source_id, length in its.forks
        ],
        closes=its.closes,
        truncates=[
            pb.TruncatePlan(sequence_id=sequence_id, length=length)
            for sequence_id, length in its.truncates
        ],
        suspends=[pb.SuspendPlan(sequence_id=sequence_id) for sequence_id in its.suspends],
        extends=[
            pb.ExtendPlan(sequence_id=sequence_id, length=length)
            for sequence_id, length in its.extends
        ],
        resumes=its.resumes,
        opens=[
            pb.OpenPlan(
                sequence_id=plan.sequence_id,
                token_ids=plan.token_ids,
                namespace=_namespace(plan.namespace),
                request_id=plan.request_id,
                group_id=plan.group_id,
                is_resumption=plan.is_resumption,
            )
            for plan in opens
        ],
        spare_block_count=its.num_spare_blocks,
        runs_copies=True,
        completed_transfer=its.completed_transfer,
        transfer_duration=duration(its.copy_seconds),
        prefill_token_count=its.num_prefill_tokens,
        prefill_duration=duration(its.prefill_seconds),
    )


def batches(opens: Sequence[ports.OpenPlan]) -> Iterator[list[ports.OpenPlan]]:
    """The plans in order, in lists that fit a message. Neighbours of a group stay together."""
    batch: list[ports.OpenPlan] = []
    num_tokens = 0
    for _, numbered in groupby(enumerate(opens), key=lambda pair: pair[1].group_id or pair[0]):
        group = [plan for _, plan in numbered]
        size = sum(len(plan.token_ids) for plan in group)
        if batch and num_tokens + size > _MAX_PROMPT_TOKENS:
            yield batch
            batch, num_tokens = [], 0
        batch += group
        num_tokens += size
    if batch:
        yield batch


def pin_request(plan: ports.PinPlan) -> pb.PinPrefixRequest:
    prefix = pb.PrefixTokens(token_ids=plan.token_ids, namespace=_namespace(plan.namespace))
    ttl = duration(plan.ttl_seconds)
    return pb.PinPrefixRequest(pin_id=plan.pin_id, owner=plan.owner, tokens=prefix, ttl=ttl)


def update_result(response: pb.UpdateSequencesResponse) -> ports.UpdateResult:
    return ports.UpdateResult(
        extended=[
            ports.ExtendedSequence(e.sequence_id, e.first_index, list(e.block_ids), _replaced(e))
            for e in response.extended
        ],
        opened=[
            ports.OpenedSequence(
                o.sequence_id, list(o.block_ids), o.cached_token_count, _copies(o.copies)
            )
            for o in response.opened
        ],
        refused=[ports.Refusal(r.sequence_id, r.reason, r.message) for r in response.refused],
        copies=_copies(response.copies),
        transfer=response.transfer,
        forked=[
            ports.ForkedSequence(f.sequence_id, list(f.block_ids), f.computed_token_count)
            for f in response.forked
        ],
        suspended=[
            ports.SuspendedSequence(
                s.sequence_id, s.freed_block_count, s.mode == pb.SUSPEND_MODE_SWAP
            )
            for s in response.suspended
        ],
        resumed=[
            ports.ResumedSequence(
                r.sequence_id, list(r.block_ids), r.computed_token_count, _copies(r.copies)
            )
            for r in response.resumed
        ],
        num_available_blocks=response.available_block_count,
    )


def _namespace(namespace: ports.Namespace) -> common_pb2.Namespace:
    return common_pb2.Namespace(**namespace._asdict())


def _copies(messages: Iterable[pb.BlockCopy]) -> list[ports.BlockCopy]:
    return [ports.BlockCopy(c.source_block_id, c.target_block_id) for c in messages]


def _replaced(extended: pb.ExtendedSequence) -> Sequence[ports.BlockCopy]:
    if not extended.HasField("copied_from_block_id"):
        return ()
    return [ports.BlockCopy(extended.copied_from_block_id, extended.block_ids[0])]
