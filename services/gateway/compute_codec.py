"""Between the gateway's compute types and quire.compute.v1, or the runner's own types."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from quire.common.v1 import common_pb2
from quire.compute.v1 import compute_pb2 as pb

from compute import types as ct
from gateway import ports

# What the numbers of sequences in one message may be: at most 5 bytes each, 4 MiB in all.
_MAX_STATE_NUMBERS = 400_000

# A share that a float32 cannot hold would arrive as 0, which means no limit.
_LEAST_SHARE = 1e-30

# --- messages: requests -----------------------------------------------------


def parts(step: ports.Step) -> list[ports.Step]:
    """The step in messages that fit: states of sequences first, the last one computes."""
    parts: list[ports.Step] = []
    batch: list[ports.SequenceState] = []
    size, closed = 0, step.closed
    for state in step.sequences:
        numbers = _num_numbers(state)
        if batch and size + numbers > _MAX_STATE_NUMBERS:
            parts.append(ports.Step(step.step_id, closed=closed, sequences=batch))
            batch, size, closed = [], 0, ()
        batch.append(state)
        size += numbers
    last = dataclasses.replace(step, closed=closed, sequences=batch)
    return [*parts, last]


def _num_numbers(state: ports.SequenceState) -> int:
    """What the state takes of a message, in numbers of 5 bytes; text has up to 4 a letter."""
    sampling = state.sampling
    ids = len(state.token_ids) + len(state.block_ids) + len(sampling.stop_token_ids)
    return ids + 3 * len(sampling.logit_bias) + len(sampling.grammar)


def message(step: ports.Step) -> pb.RunStepsRequest:
    return pb.RunStepsRequest(
        step_id=step.step_id,
        closed_sequence_ids=step.closed,
        sequences=[
            pb.SequenceState(
                sequence_id=state.sequence_id,
                token_ids=state.token_ids,
                block_ids=state.block_ids,
                sampling=_sampling_message(state.sampling),
                request_id=state.request_id,
                prompt_token_count=state.num_prompt_tokens,
                grammar=state.sampling.grammar,
                candidate_count=state.sampling.num_candidates,
            )
            for state in step.sequences
        ],
        extensions=[
            pb.TableExtension(
                sequence_id=e.sequence_id, first_index=e.first_index, block_ids=e.block_ids
            )
            for e in step.extensions
        ],
        copies=[
            pb.BlockCopy(source_block_id=c.source, target_block_id=c.target) for c in step.copies
        ],
        chunks=[
            pb.Chunk(
                sequence_id=c.sequence_id,
                start=c.start,
                token_count=c.num_tokens,
                sample=c.sample,
                token_ids=c.token_ids,
                draft_count=c.num_drafts,
            )
            for c in step.chunks
        ],
    )


def _sampling_message(options: ports.SamplingOptions) -> common_pb2.SamplingOptions:
    return common_pb2.SamplingOptions(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=max(options.top_p, _LEAST_SHARE),
        min_p=options.min_p,
        typical_p=max(options.typical_p, _LEAST_SHARE),
        repetition_penalty=max(options.repetition_penalty, _LEAST_SHARE),
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        logit_bias=[
            common_pb2.LogitBias(token_id=token_id, bias=bias)
            for token_id, bias in options.logit_bias
        ],
        min_token_count=options.min_tokens,
        stop_token_ids=options.stop_token_ids,
        seed=options.seed,
        sequence_index=options.sequence_index,
        return_logprob=options.return_logprob,
        return_prompt_logprobs=options.return_prompt_logprobs,
        top_logprob_count=options.num_top_logprobs,
    )


# --- messages: responses ----------------------------------------------------


def model(response: pb.GetModelResponse) -> ports.ModelInfo:
    return ports.ModelInfo(
        model_id=response.model_id,
        fingerprint=response.fingerprint,
        vocab_size=response.vocabulary_size,
        max_sequence_length=response.max_sequence_length,
        pool=ports.PoolInfo(
            block_size=response.layout.block_size,
            num_blocks=response.layout.block_count,
            generation=response.pool_generation,
        ),
        has_draft_model=response.has_draft_model,
    )


def result(response: pb.RunStepsResponse) -> ports.StepResult:
    return ports.StepResult(
        step_id=response.step_id,
        tokens=[
            ports.SampledToken(
                token.sequence_id,
                token.token_id,
                token.logprob if token.HasField("logprob") else None,
                _tops(token.top),
            )
            for token in response.tokens
        ],
        elapsed=response.elapsed.ToNanoseconds() / 1e9,
        copy_elapsed=response.copy_elapsed.ToNanoseconds() / 1e9,
        candidates=[ports.Candidates(c.sequence_id, _tops(c.tokens)) for c in response.candidates],
        prompt_logprobs=[_prompt_logprobs(prompt) for prompt in response.prompt_logprobs],
        failures=[
            ports.SequenceFailure(f.sequence_id, f.reason, f.message) for f in response.failures
        ],
    )


def _prompt_logprobs(message: pb.PromptLogprobs) -> ports.PromptLogprobs:
    tokens = [
        ports.SampledToken(
            message.sequence_id, token.token.token_id, token.token.logprob, _tops(token.top)
        )
        for token in message.tokens
    ]
    return ports.PromptLogprobs(message.sequence_id, message.start, tokens)


def _tops(
    tokens: Iterable[pb.TokenLogprob] | Iterable[ct.TokenLogprob],
) -> tuple[ports.TokenLogprob, ...]:
    return tuple(ports.TokenLogprob(token.token_id, token.logprob) for token in tokens)


# --- the runner in this process ---------------------------------------------


def local_model(info: ct.ModelInfo, handle: ct.PoolHandle) -> ports.ModelInfo:
    return ports.ModelInfo(
        model_id=info.model_id,
        fingerprint=info.fingerprint,
        vocab_size=info.vocab_size,
        max_sequence_length=info.max_sequence_length,
        pool=ports.PoolInfo(
            block_size=handle.layout.block_size,
            num_blocks=handle.layout.num_blocks,
            generation=handle.generation,
        ),
        has_draft_model=info.has_draft_model,
    )


def local_step(step: ports.Step) -> ct.Step:
    return ct.Step(
        step_id=step.step_id,
        closed=step.closed,
        sequences=[
            ct.SequenceState(
                s.sequence_id, s.token_ids, s.block_ids, _sampling(s.sampling), s.num_prompt_tokens
            )
            for s in step.sequences
        ],
        extensions=[
            ct.TableExtension(e.sequence_id, e.first_index, e.block_ids) for e in step.extensions
        ],
        copies=[ct.BlockCopy(c.source, c.target) for c in step.copies],
        chunks=[ct.Chunk(*chunk) for chunk in step.chunks],
    )


def _sampling(options: ports.SamplingOptions) -> ct.SamplingOptions:
    return ct.SamplingOptions(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        typical_p=options.typical_p,
        repetition_penalty=options.repetition_penalty,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        logit_bias=options.logit_bias,
        min_tokens=options.min_tokens,
        stop_token_ids=options.stop_token_ids,
        grammar=options.grammar,
        seed=options.seed,
        sequence_index=options.sequence_index,
        return_logprob=options.return_logprob,
        return_prompt_logprobs=options.return_prompt_logprobs,
        num_top_logprobs=options.num_top_logprobs,
        num_candidates=options.num_candidates,
    )


def local_result(result: ct.StepResult) -> ports.StepResult:
    return ports.StepResult(
        result.step_id,
        [_sampled(token) for token in result.tokens],
        result.elapsed,
        result.copy_elapsed,
        [ports.Candidates(c.sequence_id, _tops(c.tokens)) for c in result.candidates],
        [
            ports.PromptLogprobs(p.sequence_id, p.start, [_sampled(token) for token in p.tokens])
            for p in result.prompt_logprobs
        ],
        [ports.SequenceFailure(*failure) for failure in result.failures],
    )


def _sampled(token: ct.SampledToken) -> ports.SampledToken:
    return ports.SampledToken(token.sequence_id, token.token_id, token.logprob, _tops(token.top))
