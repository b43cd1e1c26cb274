"""Between messages of quire.compute.v1 and the step runner's types."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from google.protobuf import duration_pb2
from quire.common.v1 import common_pb2
from quire.compute.v1 import compute_pb2 as pb
from quire.kvstore.v1 import kvstore_pb2

from compute import types
from compute.errors import ComputeError, PoolUnavailable
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
    """Raises PoolUnavailable if the pool is in memory of a kind that we do not know."""
    shape = message.layout.shape
    return types.PoolHandle(
        memory=_memory(message),
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


def _memory(message: kvstore_pb2.PoolHandle) -> types.SharedMemory:
    kind = message.WhichOneof("memory")
    if kind == "cuda_ipc":
        cuda = message.cuda_ipc
        return types.CudaIpcMemory(
            cuda.handle, cuda.device_uuid, cuda.exporter_pid, cuda.exporter_pid_namespace
        )
    if kind == "posix":
        return types.PosixMemory(message.posix.name)
    if message.name:  # from a kvstore that knows no other memory
        return types.PosixMemory(message.name)
    raise PoolUnavailable(
        "the kvstore's pool is in memory of a kind that this worker does not know: update compute"
    )


# --- requests ---------------------------------------------------------------


def _sampling(message: pb.SequenceState) -> types.SamplingOptions:
    """0, which is what an absent field reads as, is no limit or no penalty."""
    sampling = message.sampling
    return types.SamplingOptions(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p or 1.0,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p or 1.0,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=tuple((bias.token_id, bias.bias) for bias in sampling.logit_bias),
        min_tokens=sampling.min_token_count,
        stop_token_ids=tuple(sampling.stop_token_ids),
        grammar=message.grammar,
        seed=sampling.seed,
        sequence_index=sampling.sequence_index,
        return_logprob=sampling.return_logprob,
        return_prompt_logprobs=sampling.return_prompt_logprobs,
        num_top_logprobs=sampling.top_logprob_count,
        num_candidates=message.candidate_count,
    )


def _chunk(message: pb.Chunk) -> types.Chunk:
    return types.Chunk(
        message.sequence_id,
        message.start,
        message.token_count,
        message.sample,
        tuple(message.token_ids),
        message.draft_count,
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
                sampling=_sampling(state),
                num_prompt_tokens=state.prompt_token_count,
            )
            for state in message.sequences
        ],
        extensions=[
            types.TableExtension(e.sequence_id, e.first_index, list(e.block_ids))
            for e in message.extensions
        ],
        copies=[types.BlockCopy(c.source_block_id, c.target_block_id) for c in message.copies],
        chunks=[_chunk(chunk) for chunk in message.chunks],
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
        has_draft_model=info.has_draft_model,
    )


def step_result(result: types.StepResult) -> pb.RunStepsResponse:
    elapsed = duration_pb2.Duration()
    elapsed.FromNanoseconds(int(result.elapsed * 1e9))
    copy_elapsed = duration_pb2.Duration()
    copy_elapsed.FromNanoseconds(int(result.copy_elapsed * 1e9))
    return pb.RunStepsResponse(
        step_id=result.step_id,
        tokens=[_sampled_token(token) for token in result.tokens],
        elapsed=elapsed,
        copy_elapsed=copy_elapsed,
        candidates=[
            pb.Candidates(sequence_id=c.sequence_id, tokens=_token_logprobs(c.tokens))
            for c in result.candidates
        ],
        prompt_logprobs=[
            pb.PromptLogprobs(
                sequence_id=p.sequence_id,
                start=p.start,
                tokens=[_prompt_token(token) for token in p.tokens],
            )
            for p in result.prompt_logprobs
        ],
        failures=[
            pb.SequenceFailure(sequence_id=f.sequence_id, reason=f.reason, message=f.message)
            for f in result.failures
        ],
    )


def _token_logprobs(tokens: Iterable[types.TokenLogprob]) -> list[pb.TokenLogprob]:
    return [pb.TokenLogprob(token_id=t.token_id, logprob=t.logprob) for t in tokens]


def _sampled_token(token: types.SampledToken) -> pb.SampledToken:
    return pb.SampledToken(
        sequence_id=token.sequence_id,
        token_id=token.token_id,
        logprob=token.logprob,
        top=_token_logprobs(token.top),
    )


def _prompt_token(token: types.SampledToken) -> pb.PromptToken:
    return pb.PromptToken(
        token=pb.TokenLogprob(token_id=token.token_id, logprob=token.logprob),
        top=_token_logprobs(token.top),
    )


def refused(step_id: int, error: ComputeError) -> pb.RunStepsResponse:
    return pb.RunStepsResponse(
        step_id=step_id, refusal=pb.StepRefusal(reason=error.reason, message=str(error))
    )
