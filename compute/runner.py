"""Runs steps of one model over one page pool."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from compute.batching import PackedStep, pack
from compute.block_copies import run_copies
from compute.drafting import DraftModel, check_fits, widened
from compute.errors import ModelUnsupported
from compute.kernels import Kernels
from compute.mapping import MapMemory
from compute.model import Decoder
from compute.pool import AttachedPool, map_posix
from compute.ports import PoolProvider
from compute.results import StepResults
from compute.sampling import Grammars, NoGrammars, RowsToDraw, SequenceSampler, sample
from compute.sequences import KnownSequence, PlannedChunk, StepLimits, StepPlan
from compute.types import ModelInfo, PoolHandle, SequenceState, Step, StepResult


class StepRunner:
    """The step contract of quire.compute.v1 for one driver at a time.

    States: a pool is attached from construction to `close`. Not thread-safe: one thread
    runs steps. On any error the sequences are as before the step. The pool is too, unless
    the error came out of the forward pass itself; then slots of this step may hold
    unfinished KV, which running the step again overwrites.

    With a draft model, blocks have room for its KV behind the model's, and every step
    writes both.
    """

    def __init__(
        self,
        model: Decoder,
        kernels: Kernels,
        provider: PoolProvider,
        *,
        model_id: str,
        fingerprint: bytes,
        draft: Decoder | None = None,
        grammars: Grammars | None = None,
        kv_dtype: str = "",
        map_memory: MapMemory = map_posix,
    ) -> None:
        """Attach the provider's pool.

        `fingerprint` is of the model and its draft. `grammars` are closed with it.
        `kv_dtype`: type of KV; empty: as the model's. `map_memory` maps the page pool; a
        host pool is always shared memory.

        Raises ModelUnsupported if the draft model does not fit, and what attach_pool and
        AttachedPool raise.
        """
        self._model = model
        self._kernels = kernels
        self._provider = provider
        self._map_memory = map_memory
        config = model.config
        self._draft = None
        self._grammars = grammars or NoGrammars()
        kv_shape = config.kv_shape(kv_dtype or _dtype_name(model.dtype))
        self._num_layers = kv_shape.num_layers
        if draft is not None:
            check_fits(model, draft)
            if kv_shape.is_quantized:
                raise ModelUnsupported("a draft model's KV cannot be quantized: --kv-dtype auto")
            kv_shape = widened(kv_shape, draft.config.kv_shape(kv_shape.dtype))
            self._draft = DraftModel(draft)
        self._info = ModelInfo(
            model_id=model_id,
            fingerprint=fingerprint,
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_sequence_length,
            kv_shape=kv_shape,
            has_draft_model=draft is not None,
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

        Raises what attach_pool and AttachedPool raise; the old pool stays attached, unless
        its memory has ended with the process that it was from.
        """
        if self._pool.is_orphaned():
            # First, since a device may have no room for another pool while we keep this one.
            self.reset()
            self._let_go()
        handle = self._provider.attach_pool(self._info.kv_shape)
        old, old_host = self._pool, self._host
        if handle.generation == old.handle.generation and not old.is_closed:
            return
        self._attach(handle)
        self.reset()
        old.close()
        if old_host is not None:
            old_host.close()

    def reset(self) -> None:
        """Forget all sequences."""
        self._sequences.clear()

    def close(self) -> None:
        """Let go of the pool and stop compiling grammars. No step can run after it."""
        self._grammars.close()
        self.reset()
        self._let_go()

    def run(self, step: Step) -> StepResult:
        """Run one step and append what it drew.

        Raises:
            InvalidStep: the step contradicts what is known; neither sequences nor pool
                were touched.
            PoolUnavailable: the pool was closed.
        """
        started = time.perf_counter()
        blocks = self._pool.blocks
        layout = self._pool.handle.layout
        limits = StepLimits(
            layout,
            self._num_host_blocks,
            self._info.vocab_size,
            self._info.max_sequence_length,
            self._draft is not None,
        )
        plan = StepPlan(step, self._sequences, limits, self._new_sampler)
        packed = pack(plan.chunks, layout.block_size)
        copying = time.perf_counter()
        if step.copies:
            host = self._host.blocks if self._host is not None else None
            run_copies(self._kernels, blocks, host, step.copies)
        copied = time.perf_counter() - copying
        results = StepResults()
        if plan.chunks:
            self._compute(plan, packed, results)
        self._adopt(plan, results)
        return results.of_step(step.step_id, time.perf_counter() - started, copied)

    def _new_sampler(self, state: SequenceState) -> SequenceSampler:
        text = state.sampling.grammar
        grammar = self._grammars.compile(text) if text else None
        return SequenceSampler(state.sampling, state.num_prompt_tokens, grammar)

    def _compute(self, plan: StepPlan, packed: PackedStep, results: StepResults) -> None:
        """Guess, forward, score and draw, in the order of the chunks."""
        if self._draft is not None:
            if plan.wanted_guesses:
                block_size = self._pool.handle.layout.block_size
                plan.chunks = self._draft.guess(plan.chunks, plan.wanted_guesses, block_size)
                packed = pack(plan.chunks, block_size)
            self._draft.write(packed)
        outputs = self._model.forward(packed.batch, self._kv_layers)
        for chunk, rows in zip(plan.chunks, packed.outputs, strict=True):
            if chunk.num_scored:
                scored = outputs[rows.start : rows.start + chunk.num_scored]
                results.score(chunk, scored, self._model.logits)
        self._draw(plan.chunks, packed, outputs, results)

    def _draw(
        self,
        chunks: Sequence[PlannedChunk],
        packed: PackedStep,
        outputs: torch.Tensor,
        results: StepResults,
    ) -> None:
        drawing = [
            (chunk, rows[-chunk.num_draws :])
            for chunk, rows in zip(chunks, packed.outputs, strict=True)
            if chunk.sample
        ]
        wanted, num_rows = [], 0
        for chunk, rows in drawing:
            known, sampler = chunk.sequence.token_ids, chunk.sequence.sampler
            wanted.append(RowsToDraw(sampler, num_rows, known, chunk.given, chunk.guesses))
            num_rows += len(rows)
        if not wanted:
            return
        in_order = outputs[[row for _, rows in drawing for row in rows]]
        drawn = sample(self._model.logits(in_order), wanted)
        for (chunk, _), each in zip(drawing, drawn, strict=True):
            results.add(chunk.sequence_id, each)

    def _adopt(self, plan: StepPlan, results: StepResults) -> None:
        """Make the sequences what the plan says they are after the step."""
        for sequence_id in plan.closed:
            self._sequences.pop(sequence_id, None)
        self._sequences |= plan.changed
        for chunk in plan.chunks:
            if chunk.sequence_id not in results.failures:
                drawn = results.appended.get(chunk.sequence_id, ())
                chunk.sequence.token_ids += [*chunk.given, *drawn]

    def _attach(self, handle: PoolHandle) -> None:
        host = handle.host
        attached = AttachedPool(host, self._info.kv_shape) if host is not None else None
        pool = AttachedPool(handle, self._info.kv_shape, self._map_memory)
        self._pool, self._host = pool, attached
        self._num_host_blocks = host.layout.num_blocks if host is not None else 0
        self._kv_layers = list(pool.tensor.unbind(1))[: self._num_layers]
        if self._draft is not None:
            self._draft.attach(pool.tensor, self._num_layers)

    def _let_go(self) -> None:
        """Close the pools and drop all views of them."""
        self._kv_layers = []
        if self._draft is not None:
            self._draft.detach()
        self._pool.close()
        if self._host is not None:
            self._host.close()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
