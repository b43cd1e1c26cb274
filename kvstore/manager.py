"""The page manager: the life of sequences over one page pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvstore import attachment, audit, growth, insight, lease, pinning, sharing, swapping, updating
from kvstore.attachment import Attached, ManagerOptions
from kvstore.errors import InvalidRequest, LayoutMismatch, LeaseLapsed, PoolNotAttached
from kvstore.events import EventLog
from kvstore.eviction import POLICIES
from kvstore.kill_points import Reached, ignore
from kvstore.ports import PoolStorage
from kvstore.posix_pool import PosixStorage
from kvstore.sequences import check_batch
from kvstore.state import PoolState
from kvstore.types import (
    BLOCK_SIZES,
    BlockCopy,
    CommitPlan,
    ExtendedSequence,
    ExtendPlan,
    Finding,
    ForkedSequence,
    ForkPlan,
    KvShape,
    OpenedSequence,
    OpenPlan,
    PinInfo,
    PinPlan,
    PoolHandle,
    PoolStats,
    ResumedSequence,
    SequenceInfo,
    SuspendedSequence,
    SuspendPlan,
    TruncatePlan,
    Update,
    UpdateResult,
)


class PageManager:
    """Decides which sequence holds which block of one pool.

    States: no pool, attached (after the first `attach_pool`, or with the pool of a manager
    before it), closed. A call that fails leaves the pool unchanged. Not thread-safe: one
    event loop owns a manager.

    `epoch` says who calls: the driver of that lease, or, if it is 0, another client.
    Sequences belong to whoever opened them; others can fork and pin them, and no more.
    Calls with an epoch raise LeaseLapsed if it is not the present driver's.
    """

    def __init__(
        self,
        options: ManagerOptions,
        storage: PoolStorage | None = None,
        *,
        reached: Reached = ignore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over what an earlier manager has left in `storage`, if it fits the options.

        `clock`: seconds, the same for all processes of this machine.

        Raises:
            InvalidRequest: the block size is not 8, 16 or 32, or there is no such eviction
                policy.
        """
        if options.block_size not in BLOCK_SIZES:
            raise InvalidRequest("block_size", f"{options.block_size} is not one of {BLOCK_SIZES}")
        if options.eviction not in POLICIES:
            raise InvalidRequest("eviction", f"{options.eviction!r} is not one of {list(POLICIES)}")
        self._options = options
        self._storage = PosixStorage() if storage is None else storage
        self._reached = reached
        self._clock = clock
        self._attached, found, text = attachment.recover(options, self._storage, reached)
        self.recovered = text  # what became of an earlier pool, in words; empty: none
        self._epoch = found.epoch if found is not None else 0  # the driver's; 0: none
        self._last_epoch = self._epoch
        self._num_audits = self._num_findings = 0

    # --- the driver ---------------------------------------------------------

    def acquire_driver_lease(self, *, adopt: bool = False) -> tuple[int, int]:
        """Make the caller the driver; its epoch, and how many sequences were closed.

        Those are what drivers before it have left open; their updates are refused from now
        on. Sequences of other clients stay. With `adopt` the sequences and pins of the
        driver before are the caller's instead.
        """
        # Never the same again, not even after a restart of this process.
        self._epoch = self._last_epoch = max(self._last_epoch + 1, time.time_ns())
        return self._epoch, self._change_hands(adopt=adopt)

    def release_driver_lease(self, epoch: int) -> None:
        """Close what the driver has open, and leave its seat empty. Others are ignored."""
        if epoch and epoch == self._epoch:
            self._epoch = 0
            self._change_hands(adopt=False)

    # --- the pool -----------------------------------------------------------

    def attach_pool(self, shape: KvShape) -> PoolHandle:
        """The pool for KV of this shape, created by the first call.

        Raises:
            InvalidRequest: a dimension below 1 or an unknown dtype; limits of tenants that
                are over what the pool has.
            LayoutMismatch: the pool exists with another shape.
            NoRoomForPool: the memory does not hold it.
        """
        attachment.check_shape(shape)
        if self._attached is None:
            self._attached = attachment.create(self._options, self._storage, shape, self._reached)
            self._attached.state.epoch = self._epoch
            self._attached.journal.epoch(self._epoch)
        present = self._attached.handle.layout.shape
        if present != shape:
            raise LayoutMismatch(f"the pool is for {present}, not for {shape}")
        return self._attached.handle

    @property
    def num_changes(self) -> int:
        """Grows when the pool changes, and not with calls that leave it as it is."""
        return 0 if self._attached is None else self._attached.journal.num_records

    @property
    def is_attached(self) -> bool:
        return self._attached is not None

    def get_pool(self) -> PoolHandle:
        """The pool. Raises PoolNotAttached before the first `attach_pool`."""
        return self._pool().handle

    def get_host_pool(self) -> PoolHandle | None:
        """The host pool beside it, if there is one. Raises PoolNotAttached."""
        return self._pool().host_handle

    def close(self) -> None:
        """Release the pool and forget its sequences. Safe to repeat."""
        if self._attached is not None:
            attached, self._attached = self._attached, None
            attached.state.blocks.events.close()
            attached.memory.close()

    def leave(self) -> None:
        """Leave the pool to the next manager of the same storage. Safe to repeat."""
        if self._attached is not None:
            attached, self._attached = self._attached, None
            attached.memory.leave()

    def keep(self) -> None:
        """Say that the pool is in use, and end what has lapsed. Called every second or so."""
        if self._attached is not None:
            self._attached.memory.touch()
            self._attached.journal.mend()
            pinning.expire(self._attached.state, self._clock())
            self._attached.state.blocks.tenants.forget_idle()

    # --- sequences ----------------------------------------------------------

    def open_sequences(self, plans: Iterable[OpenPlan], epoch: int = 0) -> list[OpenedSequence]:
        """Share each prompt's longest cached prefix and allocate the rest. All or nothing.

        Hits cover full blocks and leave at least one token to compute. A repeat of a plan
        whose sequence is open returns the table it was opened with.

        Raises:
            PoolNotAttached, InvalidRequest
            SequenceExists: the id is open with other tokens or in another namespace.
            PromptExceedsPool: a prompt could never fit.
            OutOfBlocks, QuotaExceeded: they do not fit now.
        """
        state, plans = self._state(epoch), check_batch(plans)
        return updating.open_or_yield(state, plans, epoch, copies=False)

    def extend_sequences(
        self, plans: Iterable[ExtendPlan], epoch: int = 0
    ) -> list[ExtendedSequence]:
        """Make room up to the given lengths. All or nothing; a lesser length is a no-op.

        Returns the sequences that got blocks.

        Raises:
            PoolNotAttached, SequenceNotFound, ForeignSequence, SequenceSuspended
            OutOfBlocks, QuotaExceeded: they do not fit now.
        """
        return growth.extend_sequences(self._state(epoch), check_batch(plans), epoch)

    def fork_sequences(self, plans: Iterable[ForkPlan], epoch: int = 0) -> list[ForkedSequence]:
        """Second sequences that share the blocks of their source, a partial one too.

        With all of its tokens, or the first ones. All or nothing. Whoever first needs a slot
        in a shared partial block gets a copy of it from `extend_sequences`; the last one
        writes to the block itself. A plan may name a sequence of an earlier plan as its
        source, and anybody's.

        Raises:
            PoolNotAttached, SequenceSuspended
            InvalidRequest: a length above the tokens that are known of the source.
            SequenceNotFound: no such source.
            SequenceExists: the id is open. A fork is not repeated.
        """
        return sharing.fork_sequences(self._state(epoch), check_batch(plans), epoch)

    def truncate_sequences(self, plans: Iterable[TruncatePlan], epoch: int = 0) -> None:
        """Cut sequences to fewer tokens and release what is behind. All or nothing.

        A block that is cut within and that others read is copied before the next write.

        Raises:
            PoolNotAttached, SequenceNotFound, ForeignSequence, SequenceSuspended
            InvalidRequest: a length below 1 or above the present one.
        """
        sharing.truncate_sequences(self._state(epoch), check_batch(plans), epoch)

    def commit_blocks(self, plans: Iterable[CommitPlan], epoch: int = 0) -> None:
        """The KV of leading tokens is written: their full blocks become findable.

        All or nothing. A count below the present one leaves the count as it is.

        Raises:
            PoolNotAttached, SequenceNotFound, ForeignSequence, SequenceSuspended
            InvalidCommit: tokens that differ from known ones, a gap, a count beyond the
                known tokens or the slots, or a sequence that is listed twice.
        """
        growth.commit_blocks(self._state(epoch), check_batch(plans), epoch)

    def close_sequences(self, sequence_ids: Iterable[str], epoch: int = 0) -> None:
        """Release the references of sequences. Ids that are not open are ignored.

        Raises:
            ForeignSequence: one of them is somebody else's. All stay open.
        """
        if self._attached is not None:
            state = self._state(epoch)
            given = check_batch(sequence_ids, "sequence_ids")
            ids = dict.fromkeys(i for i in given if i in state.sequences)
            state.close([state.find(sequence_id, epoch) for sequence_id in ids])

    def update(self, update: Update, epoch: int = 0) -> UpdateResult:
        """Apply the lists of an update in the order of its fields, each entry on its own.

        A refused entry changes nothing. Groups are suspended, resumed and opened whole; named
        twice is named once. Resumes and opens end at the first that finds no room, or would
        leave less than `num_spare_blocks`, unless it is within its tenant's floor. What is
        opened or forked belongs to the driver of this epoch (0: to no driver).

        Raises:
            LeaseLapsed
            InvalidRequest: a list with too many entries.
            PoolNotAttached: there is nothing to change, unless the update only closes.
        """
        self._check_epoch(epoch)
        updating.check_reports(update)
        for name in updating.LISTS:
            check_batch(getattr(update, name), name)
        if self._attached is None:
            if any(getattr(update, name) for name in updating.LISTS if name != "closes"):
                raise PoolNotAttached
            return UpdateResult(extended=[], opened=[], refused=[])
        if update.completed_transfer:
            self.complete_transfer(update.completed_transfer, update.transfer_seconds, epoch)
        self.observe_prefill(update.num_prefill_tokens, update.prefill_seconds)
        return updating.update(self._state(epoch), update, epoch)

    def suspend_sequences(
        self, plans: Iterable[SuspendPlan], epoch: int = 0, *, runs_copies: bool = False
    ) -> tuple[list[SuspendedSequence], list[BlockCopy], int]:
        """Take sequences, and all of their groups, off the page pool. All or nothing.

        Returns what was decided for each, the copies to run before anything else is
        written, and the number to complete them by. Those who run no copies, or have no
        room in the host pool, recompute.

        Raises:
            PoolNotAttached, SequenceNotFound, ForeignSequence, SequenceSuspended
        """
        state, plans = self._state(epoch), check_batch(plans)
        suspended = swapping.suspend_sequences(state, plans, epoch, copies=runs_copies)
        num_copies = sum(one.num_copied_blocks for one in suspended)
        return (suspended, *updating.take_copies(state, (), num_swapped_out=num_copies))

    def resume_sequences(
        self, sequence_ids: Iterable[str], epoch: int = 0, *, runs_copies: bool = False
    ) -> tuple[list[ResumedSequence], list[BlockCopy], int]:
        """Bring suspended sequences back, and all of their groups. All or nothing.

        They share the full blocks of tokens that they have in common. Returns also copies
        that must come before those of the sequences, and the number to complete all by.

        Raises:
            PoolNotAttached, SequenceNotFound, ForeignSequence, SequenceNotSuspended
            PromptExceedsPool: a sequence, or a group, can never come back.
            OutOfBlocks, QuotaExceeded: they do not fit now.
        """
        state, sequence_ids = self._state(epoch), check_batch(sequence_ids, "sequence_ids")
        state.blocks.host.is_open = runs_copies
        try:
            resumed = updating.resume_or_yield(state, sequence_ids, epoch, copies=runs_copies)
        finally:
            state.blocks.host.is_open = False
        return (resumed, *updating.take_copies(state, resumed))

    def complete_transfer(self, transfer: int, seconds: float, epoch: int = 0) -> None:
        """All copies of answers up to this transfer were run, in so much time (0: unknown).

        Raises:
            PoolNotAttached, LeaseLapsed
        """
        state = self._state(epoch)
        size, tails = state.blocks.host.complete(transfer)
        state.costs.observe_copies(size.num_host, size.num_inside, size.num_swaps, seconds)
        if tails:
            state.journal.sequences(tails)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """So many prompt tokens were computed in this time: what recomputing costs."""
        if self._attached is not None:
            self._attached.state.costs.observe_prefill(num_tokens, seconds)

    # --- pins ---------------------------------------------------------------

    def pin_prefix(self, plan: PinPlan, epoch: int = 0) -> PinInfo:
        """Keep a prefix's whole blocks, those that are there and those that will be.

        A repeat renews the lease. A pin with a driver's epoch ends with that lease.

        Raises:
            PoolNotAttached, InvalidRequest, SequenceNotFound
            PinExists: the id is that of another pin.
            PinBudgetExceeded: no weaker pins could give way to it.
            OutOfBlocks, QuotaExceeded: what is cached cannot be held beside others' floors.
        """
        return pinning.pin_prefix(self._state(epoch), plan, epoch, self._clock())

    def renew_pin(self, pin_id: str, ttl_seconds: float) -> PinInfo:
        """Begin a pin's time again. Raises PoolNotAttached, InvalidRequest, PinNotFound."""
        return pinning.renew_pin(self._state(0), pin_id, ttl_seconds, self._clock())

    def unpin(self, *, pin_id: str = "", owner: str = "") -> int:
        """End a pin, or all of an owner's; how many. None is no error.

        Raises:
            InvalidRequest: it is not said which.
        """
        if not (pin_id or owner):
            raise InvalidRequest("target", "neither a pin nor an owner is given")
        if self._attached is None:
            return 0
        return pinning.unpin(
            self._state(0),
            lambda pin: pin.pin_id == pin_id if pin_id else pin.owner == owner,
        )

    def list_pins(self) -> list[PinInfo]:
        """All pins, oldest first."""
        if self._attached is None:
            return []
        state, now = self._pool().state, self._clock()
        return [pinning.info(state, pin, now) for pin in state.pins.all()]

    # --- insight ------------------------------------------------------------

    def is_open(self, sequence_id: str) -> bool:
        return self._attached is not None and sequence_id in self._attached.state.sequences

    def list_sequences(
        self, page_size: int = 0, page_token: str = "", *, with_tokens: bool = False
    ) -> tuple[list[SequenceInfo], str]:
        """A page of the open sequences, oldest first, and the token of the next page.

        Raises:
            InvalidRequest: a size outside 0 to 1000, or a token that is not ours.
        """
        state = self._attached.state if self._attached is not None else None
        return insight.list_sequences(state, page_size, page_token, with_tokens=with_tokens)

    def events(self) -> EventLog:
        """The log of which blocks can be found. Raises PoolNotAttached.

        A repair begins another one.
        """
        return self._pool().state.blocks.events

    def stats(self) -> PoolStats:
        """The counters at this instant; all 0 without a pool."""
        if self._attached is None:
            return PoolStats()
        stats = insight.stats(self._attached.state)
        return replace(
            stats,
            num_audits=self._num_audits,
            num_findings=self._num_findings,
            is_journal_whole=self._attached.journal.is_whole,
        )

    def audit(self, *, repair: bool = False) -> list[Finding]:
        """Check every invariant from scratch. Slow.

        `repair`: what is wrong is made right from the sequences' tables and tokens; cached
        blocks that contradict them are forgotten.
        """
        if self._attached is None:
            return []
        findings = audit.findings(self._attached.state)
        self._num_audits += 1
        self._num_findings += len(findings)
        if findings and repair:
            attachment.repair(self._options, self._attached, self._reached)
        return findings

    # --- parts --------------------------------------------------------------

    def _pool(self) -> Attached:
        if self._attached is None:
            raise PoolNotAttached
        return self._attached

    def _state(self, epoch: int) -> PoolState:
        """What a call works on. Raises PoolNotAttached, LeaseLapsed."""
        self._check_epoch(epoch)
        attached = self._pool()
        attached.journal.tidy()
        pinning.expire(attached.state, self._clock())
        return attached.state

    def _change_hands(self, *, adopt: bool) -> int:
        if self._attached is None:
            return 0
        return lease.change_hands(self._attached.state, self._epoch, adopt=adopt)

    def _check_epoch(self, epoch: int) -> None:
        if epoch and epoch != self._epoch:
            raise LeaseLapsed(epoch=epoch, present=self._epoch)
