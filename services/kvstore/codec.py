"""Between messages of quire.kvstore.v1 and the page manager's types."""

from __future__ import annotations

from collections.abc import Iterable

from quire.common.v1 import common_pb2
from quire.kvstore.v1 import kvstore_pb2 as pb

from kvstore import types
from services.common.dtypes import dtype_name, dtype_number

# --- requests ---------------------------------------------------------------


def kv_shape(message: common_pb2.KvShape) -> types.KvShape:
    return types.KvShape(
        num_layers=message.layer_count,
        num_kv_heads=message.kv_head_count,
        head_size=message.head_size,
        dtype=dtype_name(message.dtype),
    )


def open_plan(message: pb.OpenPlan) -> types.OpenPlan:
    return types.OpenPlan(
        sequence_id=message.sequence_id,
        token_ids=message.token_ids,
        namespace=namespace(message.namespace),
        driver_state=message.driver_state,
        group=message.group_id,
        is_resumption=message.is_resumption,
    )


def namespace(message: common_pb2.Namespace) -> types.Namespace:
    return types.Namespace(message.model_fingerprint, message.adapter, message.tenant, message.salt)


def extend_plan(message: pb.ExtendPlan) -> types.ExtendPlan:
    return types.ExtendPlan(message.sequence_id, message.length)


def fork_plan(message: pb.ForkPlan) -> types.ForkPlan:
    return types.ForkPlan(message.source_sequence_id, message.sequence_id, message.length)


def truncate_plan(message: pb.TruncatePlan) -> types.TruncatePlan:
    return types.TruncatePlan(message.sequence_id, message.length)


def commit_plan(message: pb.CommitPlan) -> types.CommitPlan:
    return types.CommitPlan(
        sequence_id=message.sequence_id,
        num_computed_tokens=message.computed_token_count,
        token_start=message.token_start,
        token_ids=message.token_ids,
        driver_state=message.driver_state if message.HasField("driver_state") else None,
    )


# --- responses --------------------------------------------------------------


def pool_handle(handle: types.PoolHandle) -> pb.PoolHandle:
    shape = handle.layout.shape
    message = pb.PoolHandle(
        offset_bytes=handle.offset_bytes,
        size_bytes=handle.size_bytes,
        layout=common_pb2.PoolLayout(
            shape=common_pb2.KvShape(
                layer_count=shape.num_layers,
                kv_head_count=shape.num_kv_heads,
                head_size=shape.head_size,
                dtype=dtype_number(shape.dtype),
            ),
            block_size=handle.layout.block_size,
            block_count=handle.layout.num_blocks,
        ),
        generation=handle.generation,
    )
    memory = handle.memory
    if isinstance(memory, types.PosixMemory):
        message.name = memory.name
        message.posix.name = memory.name
    else:
        message.cuda_ipc.handle = memory.handle
        message.cuda_ipc.device_uuid = memory.device_uuid
        message.cuda_ipc.exporter_pid = memory.exporter_pid
        message.cuda_ipc.exporter_pid_namespace = memory.exporter_pid_namespace
    return message


def optional_pool_handle(handle: types.PoolHandle | None) -> pb.PoolHandle | None:
    return None if handle is None else pool_handle(handle)


def audit_finding(finding: types.Finding) -> pb.AuditFinding:
    return pb.AuditFinding(kind=finding.kind, message=finding.text)


def block_copies(copies: Iterable[types.BlockCopy]) -> list[pb.BlockCopy]:
    return [
        pb.BlockCopy(source_block_id=copy.source, target_block_id=copy.target) for copy in copies
    ]


def opened(sequences: Iterable[types.OpenedSequence]) -> list[pb.OpenedSequence]:
    return [
        pb.OpenedSequence(
            sequence_id=sequence.sequence_id,
            block_ids=sequence.block_ids,
            cached_token_count=sequence.num_cached_tokens,
            copies=block_copies(sequence.copies),
        )
        for sequence in sequences
    ]


def extended(sequences: Iterable[types.ExtendedSequence]) -> list[pb.ExtendedSequence]:
    return [
        pb.ExtendedSequence(
            sequence_id=sequence.sequence_id,
            first_index=sequence.first_index,
            block_ids=sequence.block_ids,
            copied_from_block_id=sequence.copied_from,
        )
        for sequence in sequences
    ]


def forked(sequences: Iterable[types.ForkedSequence]) -> list[pb.ForkedSequence]:
    return [
        pb.ForkedSequence(
            sequence_id=sequence.sequence_id,
            block_ids=sequence.block_ids,
            length=sequence.length,
            computed_token_count=sequence.num_computed_tokens,
        )
        for sequence in sequences
    ]


def sequence_page(
    sequences: Iterable[types.SequenceInfo], next_page_token: str
) -> pb.ListSequencesResponse:
    return pb.ListSequencesResponse(
        sequences=[
            pb.SequenceInfo(
                sequence_id=sequence.sequence_id,
                length=sequence.length,
                computed_token_count=sequence.num_computed_tokens,
                block_ids=sequence.block_ids,
                token_ids=sequence.tokens,
                driver_state=sequence.driver_state,
                is_suspended=sequence.is_suspended,
                group_id=sequence.group,
                is_driven=sequence.is_driven,
            )
            for sequence in sequences
        ],
        next_page_token=next_page_token,
    )
