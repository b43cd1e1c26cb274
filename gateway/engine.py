"""The engine: requests in, events out, one driver between the kvstore and compute.

    plan ─▶ submit step k ─▶ kvstore update for k+1  ─▶ result k ─▶ plan …
                             deliver tokens of k-1

While compute is busy with a step, the engine does everything else; between a
result and the next submission it only plans.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from gateway.decoding import Emission
from gateway.errors import GatewayError, RequestExists, RequestNotFound, WorkerUnavailable
from gateway.generation import Generation
from gateway.group import SequenceGroup
from gateway.limits import Limits
from gateway.ports import Compute, KvStore, ModelInfo, PinPlan, Step, StepResult
from gateway.scheduler import Scheduler
from gateway.stats import Counters, EngineStats
from gateway.tokenizer import Tokenizer
from gateway.types import FinishReason, GenerationEvent, GenerationRequest
from gateway.validation import longest_sequence, pool_tokens, validate_request
from gateway.workers import Workers

_log = logging.getLogger(__name__)

_STOPPING = "the server is shutting down"
_POOL_HELD = "the page pool is full, and none of it is ours to give back"
_BLOCKED_POLL = 0.1  # seconds until we ask again for blocks that others hold
_BLOCKED_GRACE = 2.0  # seconds that we may be blocked and still be ready


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Times in seconds."""

    limits: Limits = field(default_factory=Limits)
    step_timeout: float = 30.0  # a step that takes longer counts as a dead worker
    drain_timeout: float = 5.0  # that running requests get at a stop
    queue_timeout: float = 30.0  # that queued requests wait for lost workers
    probe_interval: float = 2.0  # between looks at the workers while idle
    first_backoff: float = 0.05  # between attempts to connect, doubling
    last_backoff: float = 0.5


class Engine:
    """Serves generations with one kvstore and one compute worker.

    States: connecting -> ready -> connecting ... -> draining -> stopped. One event
    loop owns it. Sequence ids carry a random name of this engine, since the kvstore
    outlives it.
    """

    def __init__(
        self,
        kv: KvStore,
        compute: Compute,
        tokenizer: Tokenizer,
        settings: EngineSettings | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._settings = settings or EngineSettings()
        owner = secrets.token_hex(8)
        timeout = self._settings.step_timeout
        self._workers = Workers(kv, compute, owner=owner, step_timeout=timeout)
        self._scheduler = Scheduler(self._settings.limits, tokenizer.eos_ids, owner)
        self._generations: dict[str, Generation] = {}  # by request id, until read to the end
        self._by_group: dict[SequenceGroup, Generation] = {}
        self._undelivered: list[Emission] = []
        self._model: ModelInfo | None = None
        self._is_connected = self._is_draining = False
        self._obstacle = "the workers are not there yet"  # while not connected
        self._blocked_since: float | None = None  # others hold the pool, and we have nothing
        self._wake = asyncio.Event()  # there is something to plan
        self._settled = asyncio.Event()  # a generation got its last token
        self._driver: asyncio.Task[None] | None = None
        self._counters = Counters()

    # --- for applications -----------------------------------------------------

    @property
    def model(self) -> ModelInfo:
        """The served model. Raises WorkerUnavailable until compute has told."""
        if self._model is None:
            raise WorkerUnavailable(f"not ready: {self._obstacle}")
        return self._model

    def is_ready(self) -> bool:
        """Whether steps make progress: both workers answer, none is overdue, and there is room."""
        is_stuck = self._blocked_seconds() > _BLOCKED_GRACE
        return self._is_connected and not self._is_draining and not is_stuck

    def stats(self) -> EngineStats:
        return EngineStats(
            is_ready=self.is_ready(),
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_table_blocks=self._scheduler.num_table_blocks,
            preemptions=self._scheduler.preemption_stats(),
            speculation=self._scheduler.speculator.stats(),
            counters=dataclasses.replace(self._counters),
        )

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent]:
        """One Started, PromptScored if asked for, Deltas, one Finished for each continuation.

        Closing the iterator cancels the request.

        Raises, before the first event: InvalidField, RequestExists, QueueFull,
        WorkerUnavailable. Later: WorkerUnavailable when a worker was lost, GenerationFailed
        when a sequence of it cannot go on.
        """
        generation = self._accept(request)
        try:
            async for event in generation.events():
                yield event
        finally:
            self._leave(generation)

    def cancel(self, request_id: str) -> None:
        """End a request with finish reason CANCELLED. Raises RequestNotFound."""
        generation = self._generations.get(request_id)
        if generation is None or generation.is_ended:
            raise RequestNotFound(request_id)
        generation.finish(FinishReason.CANCELLED)
        self._settle(generation)

    async def pin_prefix(self, plan: PinPlan) -> None:
        """Keep a prefix in the kvstore. Raises PinRefused, WorkerUnavailable."""
        await self._workers.pin_prefix(plan)

    async def unpin(self, pin_id: str) -> None:
        """End a pin; one that is not there is no error. Raises WorkerUnavailable."""
        await self._workers.unpin(pin_id)

    async def start(self) -> None:
        """Begin to connect and to serve, in the background."""
        self._driver = asyncio.create_task(self._drive(), name="engine driver")

    async def stop(self) -> None:
        """Refuse new requests, let those there finish within drain_timeout, release all."""
        self._is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_timeout):
                while self._by_group:
                    self._settled.clear()
                    await self._settled.wait()
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)
        await self._lose_workers(WorkerUnavailable(_STOPPING))
        self._fail_waiting(WorkerUnavailable(_STOPPING))
        await self._workers.close()

    def _accept(self, request: GenerationRequest) -> Generation:
        if self._is_draining:
            raise WorkerUnavailable(_STOPPING)
        if not self._is_connected:
            raise WorkerUnavailable(f"not ready: {self._obstacle}")
        validate_request(request, self.model, self._scheduler.max_width)
        if request.request_id in self._generations:
            raise RequestExists(request.request_id)
        num_prompt_tokens = len(request.prompt_ids)
        longest = longest_sequence(self.model, num_prompt_tokens, request.num_sequences)
        if request.max_tokens is not None:
            longest = num_prompt_tokens + request.max_tokens
        if request.sampling.return_prompt_logprobs:
            # Each token of the prompt must be computed for its score, so none may be found.
            request = dataclasses.replace(request, salt=secrets.token_hex(16))
        group = self._scheduler.add(request, longest)
        generation = Generation(group, self.tokenizer.detokenizer)
        self._generations[request.request_id] = self._by_group[group] = generation
        self._wake.set()
        return generation

    def _leave(self, generation: Generation) -> None:
        """The reader is gone, with or without the end."""
        self._settle(generation)
        del self._generations[generation.group.request.request_id]

    def _settle(self, generation: Generation) -> None:
        """No more tokens for it. Safe to repeat."""
        self._scheduler.end(generation.group)
        self._by_group.pop(generation.group, None)
        self._settled.set()
        self._wake.set()

    # --- the driver -----------------------------------------------------------

    async def _drive(self) -> None:
        while True:
            try:
                await self._connect()
                await self._serve()
            except GatewayError as error:
                _log.warning("lost a worker: %s", error)
                self._obstacle = str(error)
                # A worker that refuses what it is told would refuse it again.
                is_theirs = not isinstance(error, WorkerUnavailable)
                await self._lose_workers(error, is_theirs=is_theirs)
            except Exception:
                _log.exception("the engine failed; it starts afresh")
                await self._lose_workers(GatewayError("the engine failed"), is_theirs=True)
            await asyncio.sleep(self._settings.first_backoff)

    async def _serve(self) -> None:
        """Step after step until a worker is lost."""
        scheduler, workers = self._scheduler, self._workers
        while True:
            step = scheduler.plan_step()
            for group, error in scheduler.take_failures():
                self._fail(group, error)
            if step is not None:
                await workers.submit(step)
            update = scheduler.plan_update()
            if step is None and not update:
                self._note_blocked(False)
                await self._deliver()
                await self._rest()
                continue
            changes, result = await workers.exchange(update, step, self._deliver())
            if changes is not None:
                self._counters.num_updates += 1
                self._announce(scheduler.apply_update(changes))
            if result is not None:
                self._undelivered = scheduler.apply_result(result)
                self._count(step, result)
            self._note_blocked(scheduler.is_blocked)
            if scheduler.is_blocked:
                await self._wait(_BLOCKED_POLL)

    def _note_blocked(self, is_blocked: bool) -> None:
        """Requests do not wait for ever for blocks that others hold."""
        if not is_blocked:
            self._blocked_since = None
        elif self._blocked_since is None:
            self._blocked_since = time.monotonic()
            _log.warning(_POOL_HELD)
        elif self._blocked_seconds() > self._settings.queue_timeout:
            self._fail_waiting(WorkerUnavailable(_POOL_HELD))

    def _blocked_seconds(self) -> float:
        return 0.0 if self._blocked_since is None else time.monotonic() - self._blocked_since

    async def _rest(self) -> None:
        """Nothing to do: sleep until a request comes, and look after the workers."""
        if not await self._wait(self._settings.probe_interval):
            model = await self._workers.probe()
            if model.pool != self.model.pool:
                raise WorkerUnavailable("the page pool was replaced")

    async def _wait(self, seconds: float) -> bool:
        """Whether something happened. What came before the call has been planned for."""
        self._wake.clear()
        try:
            async with asyncio.timeout(seconds):
                return await self._wake.wait()
        except TimeoutError:
            return False

    async def _deliver(self) -> None:
        """Turn the latest tokens into text, and end what a stop string ends."""
        emissions, self._undelivered = self._undelivered, []
        for emission in emissions:
            generation = self._by_group.get(emission.group)
            if generation is None:  # cancelled meanwhile
                continue
            generation.push(emission)
            if generation.is_ended:
                self._settle(generation)
            elif emission.prompt is None and generation.is_choice_ended(emission.index):
                self._scheduler.end_choice(emission.group, emission.index)

    def _announce(self, opened: list[SequenceGroup]) -> None:
        for group in opened:
            num_cached = group.sequences[0].num_computed
            if self._by_group[group].start(num_cached):
                self._counters.num_prompt_tokens += group.num_prompt_tokens
                self._counters.num_cached_tokens += num_cached

    def _count(self, step: Step | None, result: StepResult) -> None:
        counters = self._counters
        counters.num_steps += 1
        counters.num_step_tokens += sum(chunk.num_tokens for chunk in step.chunks) if step else 0
        counters.num_generated_tokens += len(result.tokens)
        counters.step_seconds += result.elapsed

    # --- workers that come and go ---------------------------------------------

    async def _connect(self) -> None:
        """Try until both workers are there. What waits too long meanwhile fails."""
        delay = self._settings.first_backoff
        patience = asyncio.get_running_loop().call_later(
            self._settings.queue_timeout,
            self._fail_waiting,
            WorkerUnavailable("no worker came back in time"),
        )
        try:
            while not (model := await self._try_connect()):
                await asyncio.sleep(delay)
                delay = min(2 * delay, self._settings.last_backoff)
        finally:
            patience.cancel()
        self._adopt(model)

    async def _try_connect(self) -> ModelInfo | None:
        try:
            return await self._workers.connect()
        except GatewayError as error:
            if str(error) != self._obstacle:  # once per reason, not per try
                self._obstacle = str(error)
                _log.info("waiting: %s", error)
            await self._workers.disconnect()
            return None

    def _adopt(self, model: ModelInfo) -> None:
        """Serve this model from now on. What waits was meant for the one before."""
        if self._model is not None:
            self._counters.num_reconnects += 1
            if _identity(model) != _identity(self._model):
                self._fail_waiting(WorkerUnavailable("the model or the pool was replaced"))
        self._model = model
        self._scheduler.attach(model)
        self._is_connected = True
        if not self._scheduler.speculator.is_able:
            _log.warning("--speculation draft: compute has no draft model, so nothing is guessed")
        room, length = longest_sequence(model), model.max_sequence_length
        _log.info("connected: model %s, room for %d tokens", model.model_id, pool_tokens(model))
        if room < length:
            _log.warning(
                "the page pool has room for %d tokens, the model takes %d: longer requests are "
                "refused; a larger --kv-memory helps",
                room,
                length,
            )

    async def _lose_workers(self, error: GatewayError, *, is_theirs: bool = False) -> None:
        """Let what was running wait, or end it; the next driver closes the sequences."""
        self._is_connected, self._blocked_since = False, None
        await self._deliver()
        for group in self._scheduler.abandon(is_theirs=is_theirs):
            self._fail(group, error)
        await self._workers.disconnect()

    def _fail_waiting(self, error: GatewayError) -> None:
        for group in list(self._by_group):
            self._fail(group, error)

    def _fail(self, group: SequenceGroup, error: GatewayError) -> None:
        if generation := self._by_group.get(group):
            generation.fail(error)
            self._settle(generation)


def _identity(model: ModelInfo) -> tuple[object, ...]:
    """What a queued request was checked against."""
    return model.fingerprint, model.max_sequence_length, model.pool.num_blocks
