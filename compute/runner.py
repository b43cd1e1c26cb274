"""Runs steps of one model over one page pool."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from compute.batching import PackedStep, pack
from compute.block_copies import run_copies
from compute.kernels import Kernels
from compute.model import LlamaDecoder
from compute.pool import AttachedPool
from compute.ports import PoolProvider
from compute.sampler import sample
from compute.sequences import KnownSequence, StepPlan
from compute.types import ModelInfo, PoolHandle, SampledToken, Step, StepResult


class StepRunner:
    """The step contract of quire.compute.v1 for one driver at a time.

    States: a pool is attached from construction to `close`. Not thread-safe: one thread
    runs steps. On any error the sequences are as before the step. The pool is too, unless
    the error came out of the forward pass itself; then slots of this step may hold
    unfinished KV, which running the step again overwrites.
    """

    def __init__(
        self,
        model: LlamaDecoder,
        kernels: Kernels,
        provider: PoolProvider,
        *,
        model_id: str,
        fingerprint: bytes,
    ) -> None:
        """Attach the provider's pool.

        Raises what attach_pool and AttachedPool raise.
        """
        self._model = model
        self._kernels = kernels
        self._provider = provider
        config = model.config
        self._info = ModelInfo(
            model_id=model_id,
            fingerprint=fingerprint,
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_sequence_length,
            kv_shape=config.kv_shape(_dtype_name(model.dtype)),
        )
        self._sequences: dict[str, KnownSequence] = {}
        self._kv_layers: list[torch.Tensor] = []
        self._attach(provider.attach_pool(self._info.kv_shape))

    def info(self) -> ModelInfo:
        return self._info

    def handle(self) -> PoolHandle:
        """The attached pool."""
        return self._pool.handle

    def refresh_pool(self) -> None:
        """Attach the provider's present pool if it is another one than ours.

        Sequences are forgotten then, since their blocks were in the old pool.

        Raises what attach_pool and AttachedPool raise; the old pool stays attached.
        """
        handle = self._provider.attach_pool(self._info.kv_shape)
        if handle.generation == self._pool.handle.generation:
            return
        old, old_host = self._pool, self._host
        self._attach(handle)
        self.reset()
        old.close()
        if old_host is not None:
            old_host.close()

    def reset(self) -> None:
        """Forget all sequences."""
        self._sequences.clear()

    def close(self) -> None:
        """Let go of the pool. No step can run after it."""
        self.reset()
        self._kv_layers = []
        self._pool.close()
        if self._host is not None:
            self._host.close()

    def run(self, step: Step) -> StepResult:
        """Run one step and append what it sampled.

        Raises:
            InvalidStep: the step contradicts what is known; neither sequences nor pool
                were touched.
            LogitsNotFinite: the model gave no usable logits.
            PoolUnavailable: the pool was closed.
        """
        started = time.perf_counter()
        pool = self._pool.tensor
        layout = self._pool.handle.layout
        plan = StepPlan(
            step,
            self._sequences,
            layout,
            num_host_blocks=self._num_host_blocks,
            vocab_size=self._info.vocab_size,
            max_sequence_length=self._info.max_sequence_length,
        )
        packed = pack(step.chunks, plan.sequences, layout.block_size)
        copying = time.perf_counter()
        if step.copies:
            host = self._host.tensor if self._host is not None else None
            run_copies(self._kernels, pool, host, step.copies)
        copied = time.perf_counter() - copying
        tokens = self._compute(step, plan.sequences, packed) if step.chunks else []
        self._adopt(plan, tokens)
        return StepResult(step.step_id, tokens, time.perf_counter() - started, copied)

    def _compute(
        self, step: Step, sequences: Sequence[KnownSequence], packed: PackedStep
    ) -> list[SampledToken]:
        """Forward and sample. Returns tokens in the order of the chunks."""
        logits = self._model.forward(packed.batch, self._kv_layers)
        sampled = [sequences[n] for n in packed.sampled_chunks]
        drawn = sample(
            logits,
            [sequence.sampling for sequence in sampled],
            [len(sequence.token_ids) for sequence in sampled],
        )
        by_chunk = sorted(zip(packed.sampled_chunks, drawn, strict=True))
        return [
            SampledToken(step.chunks[n].sequence_id, token_id, logprob)
            for n, (token_id, logprob) in by_chunk
        ]

    def _adopt(self, plan: StepPlan, tokens: Sequence[SampledToken]) -> None:
        """Make the sequences what the plan says they are after the step."""
        for sequence_id in plan.closed:
            self._sequences.pop(sequence_id, None)
        self._sequences |= plan.changed
        for token in tokens:
            self._sequences[token.sequence_id].token_ids.append(token.token_id)

    def _attach(self, handle: PoolHandle) -> None:
        host = handle.host
        attached = AttachedPool(host, self._info.kv_shape) if host is not None else None
        pool = AttachedPool(handle, self._info.kv_shape)
        self._pool, self._host = pool, attached
        self._num_host_blocks = host.layout.num_blocks if host is not None else 0
        self._kv_layers = list(pool.tensor.unbind(1))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
