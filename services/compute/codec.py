"""Between messages of quire.compute.v1 and the step runner's types."""

from __future__ import annotations

import dataclasses

from google.protobuf import duration_pb2
from quire.common.v1 import common_pb2
from quire.compute.v1 import compute_pb2 as pb
from quire.kvstore.v1 import kvstore_pb2

from compute import types
from compute.errors import ComputeError
from services.common.dtypes import dtype_name, dtype_number

# --- the pool ---------------------------------------------------------------


def shape_message(shape: types.KvShape) -> common_pb2.KvShape:
    return common_pb2.KvShape(
        layer_count=shape.num_layers,
        kv_head_count=shape.num_kv_heads,
        head_size=shape.head_size,
        dtype=dtype_number(shape.dtype),
    )


def layout_message(layout: types.PoolLayout) -> common_pb2.PoolLayout:
    return common_pb2.PoolLayout(
        shape=shape_message(layout.shape),
        block_size=layout.block_size,
        block_count=layout.num_blocks,
    )


def attached(message: kvstore_pb2.AttachPoolResponse) -> types.PoolHandle:
    host = pool_handle(message.host_handle) if message.HasField("host_handle") else None
    return dataclasses.replace(pool_handle(message.handle), host=host)


def pool_handle(message: kvstore_pb2.PoolHandle) -> types.PoolHandle:
    shape = message.layout.shape
    return types.PoolHandle(
        name=message.name,
        offset_bytes=message.offset_bytes,
        size_bytes=message.size_bytes,
        layout=types.PoolLayout(
            shape=types.KvShape(
                num_layers=shape.layer_count,
                num_kv_heads=shape.kv_head_count,
                head_size=shape.head_size,
                dtype=dtype_name(shape.dtype),
            ),
            block_size=message.layout.block_size,
            num_blocks=message.layout.block_count,
        ),
        generation=message.generation,
    )


# --- requests ---------------------------------------------------------------


def _sampling(message: common_pb2.SamplingOptions) -> types.SamplingOptions:
    return types.SamplingOptions(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p or 1.0,  # 0, which is what an absent field reads as, is no limit
        min_p=message.min_p,
        seed=message.seed,
        sequence_index=message.sequence_index,
        return_logprob=message.return_logprob,
    )


def step(message: pb.RunStepsRequest) -> types.Step:
    return types.Step(
        step_id=message.step_id,
        closed=list(message.closed_sequence_ids),
        sequences=[
            types.SequenceState(
                sequence_id=state.sequence_id,
                token_ids=list(state.token_ids),
                block_ids=list(state.block_ids),
                sampling=_sampling(state.sampling),
            )
            for state in message.sequences
        ],
        extensions=[
            types.TableExtension(e.sequence_id, e.first_index, list(e.block_ids))
            for e in message.extensions
        ],
        copies=[types.BlockCopy(c.source_block_id, c.target_block_id) for c in message.copies],
        chunks=[
            types.Chunk(c.sequence_id, c.start, c.token_count, c.sample) for c in message.chunks
        ],
    )


# --- responses --------------------------------------------------------------


def model(info: types.ModelInfo, handle: types.PoolHandle) -> pb.GetModelResponse:
    return pb.GetModelResponse(
        model_id=info.model_id,
        fingerprint=info.fingerprint,
        vocabulary_size=info.vocab_size,
        max_sequence_length=info.max_sequence_length,
        layout=layout_message(handle.layout),
        pool_generation=handle.generation,
    )


def step_result(result: types.StepResult) -> pb.RunStepsResponse:
    elapsed = duration_pb2.Duration()
    elapsed.FromNanoseconds(int(result.elapsed * 1e9))
    copy_elapsed = duration_pb2.Duration()
    copy_elapsed.FromNanoseconds(int(result.copy_elapsed * 1e9))
    return pb.RunStepsResponse(
        step_id=result.step_id,
        tokens=[
            pb.SampledToken(
                sequence_id=token.sequence_id, token_id=token.token_id, logprob=token.logprob
            )
            for token in result.tokens
        ],
        elapsed=elapsed,
        copy_elapsed=copy_elapsed,
    )


def refused(step_id: int, error: ComputeError) -> pb.RunStepsResponse:
    return pb.RunStepsResponse(
        step_id=step_id, refusal=pb.StepRefusal(reason=error.reason, message=str(error))
    )
