"""The page manager: the life of sequences over one page pool."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.errors import (
    InvalidRequest,
    KvStoreError,
    LayoutMismatch,
    LeaseLapsed,
    NoRoomForPool,
    OutOfBlocks,
    PoolNotAttached,
)
from kvstore.eviction import DEFAULT_POLICY, POLICIES
from kvstore.page_tables import PageTables
from kvstore.ports import PoolFactory, PoolMemory
from kvstore.posix_pool import PosixPool
from kvstore.types import (
    BLOCK_SIZES,
    DTYPE_BYTES,
    CommitPlan,
    ExtendedSequence,
    ExtendPlan,
    ForkedSequence,
    ForkPlan,
    KvShape,
    OpenedSequence,
    OpenPlan,
    PoolHandle,
    PoolLayout,
    PoolStats,
    Refusal,
    SequenceInfo,
    TruncatePlan,
    Update,
    UpdateResult,
)

_DEFAULT_PAGE_SIZE = 100
_MAX_PAGE_SIZE = 1000


@dataclass(slots=True)
class _Attached:
    """A pool in use: where it is, and who holds what in it."""

    handle: PoolHandle
    memory: PoolMemory
    tables: PageTables


class PageManager:
    """Decides which sequence holds which block of one pool.

    States: no pool, attached (after the first `attach_pool`), closed. A call that fails
    leaves the pool unchanged. Not thread-safe: one event loop owns a manager.
    """

    def __init__(
        self,
        kv_memory_bytes: int,
        block_size: int,
        pool_factory: PoolFactory = PosixPool.create,
        eviction: str = DEFAULT_POLICY,
    ) -> None:
        """`kv_memory_bytes` is the size of the pool that the first attachment creates.

        Raises:
            InvalidRequest: the block size is not 8, 16 or 32, or there is no such eviction
                policy.
        """
        if block_size not in BLOCK_SIZES:
            raise InvalidRequest("block_size", f"{block_size} is not one of {BLOCK_SIZES}")
        self._kv_memory_bytes = kv_memory_bytes
        self._block_size = block_size
        if eviction not in POLICIES:
            raise InvalidRequest("eviction", f"{eviction!r} is not one of {list(POLICIES)}")
        self._pool_factory = pool_factory
        self._eviction = eviction
        self._attached: _Attached | None = None
        self._epoch = 0  # of the present driver; 0: there is none

    # --- the driver ---------------------------------------------------------

    def acquire_driver_lease(self) -> tuple[int, int]:
        """Make the caller the driver; its epoch, and how many sequences were closed.

        Those are what drivers before it have left open; their updates are refused from now
        on. Sequences of other clients stay.
        """
        # Never the same again, not even after a restart of this process.
        self._epoch = max(self._epoch + 1, time.time_ns())
        return self._epoch, self._close_driven()

    def release_driver_lease(self, epoch: int) -> None:
        """Close what the driver has open, and leave its seat empty. Others are ignored."""
        if epoch == self._epoch:
            self._close_driven()

    def _close_driven(self) -> int:
        return self._attached.tables.close_driven() if self._attached is not None else 0

    def _check_epoch(self, epoch: int) -> None:
        if epoch and epoch != self._epoch:
            raise LeaseLapsed(epoch=epoch, present=self._epoch)

    # --- the pool -----------------------------------------------------------

    def attach_pool(self, shape: KvShape) -> PoolHandle:
        """The pool for KV of this shape, created by the first call.

        Raises:
            InvalidRequest: a dimension below 1 or an unknown dtype.
            LayoutMismatch: the pool exists with another shape.
            NoRoomForPool: the memory does not hold it.
        """
        _check_shape(shape)
        if self._attached is None:
            self._attached = self._create_pool(shape)
        present = self._attached.handle.layout.shape
        if present != shape:
            raise LayoutMismatch(f"the pool is for {present}, not for {shape}")
        return self._attached.handle

    def get_pool(self) -> PoolHandle:
        """The pool. Raises PoolNotAttached before the first `attach_pool`."""
        return self._pool().handle

    def close(self) -> None:
        """Release the pool and forget its sequences. Safe to repeat."""
        if self._attached is not None:
            attached, self._attached = self._attached, None
            attached.memory.close()

    # --- sequences ----------------------------------------------------------

    def open_sequences(self, plans: Iterable[OpenPlan], epoch: int = 0) -> list[OpenedSequence]:
        """Share each prompt's longest cached prefix and allocate the rest. All or nothing.

        Hits cover full blocks and leave at least one token to compute. A repeat of a plan
        whose sequence is open returns the table it was opened with.

        Raises:
            PoolNotAttached, InvalidRequest
            SequenceExists: the id is open with other tokens or in another namespace.
            PromptExceedsPool: a prompt could never fit.
            OutOfBlocks: they do not fit now.
        """
        return self._pool().tables.open(plans, epoch)

    def extend_sequences(self, plans: Iterable[ExtendPlan]) -> list[ExtendedSequence]:
        """Make room up to the given lengths. All or nothing; a lesser length is a no-op.

        Returns the sequences that got blocks.

        Raises:
            PoolNotAttached, SequenceNotFound
            OutOfBlocks: they do not fit now.
        """
        return self._pool().tables.extend(plans)

    def fork_sequences(self, plans: Iterable[ForkPlan]) -> list[ForkedSequence]:
        """Second sequences that share every block of their source, a partial one too.

        All or nothing. Whoever first needs a slot in a shared partial block gets a copy of
        it from `extend_sequences`; the last one writes to the block itself. A plan may name
        a sequence of an earlier plan as its source.

        Raises:
            PoolNotAttached, InvalidRequest
            SequenceNotFound: no such source.
            SequenceExists: the id is open. A fork is not repeated.
        """
        return self._pool().tables.fork(plans)

    def truncate_sequences(self, plans: Iterable[TruncatePlan]) -> None:
        """Cut sequences to fewer tokens and release what is behind. All or nothing.

        A block that is cut within and that others read is copied before the next write.

        Raises:
            PoolNotAttached, SequenceNotFound
            InvalidRequest: a length below 1 or above the present one.
        """
        self._pool().tables.truncate(plans)

    def commit_blocks(self, plans: Iterable[CommitPlan]) -> None:
        """The KV of leading tokens is written: their full blocks become findable.

        All or nothing. A count below the present one leaves the count as it is.

        Raises:
            PoolNotAttached, SequenceNotFound
            InvalidCommit: tokens that differ from known ones, a gap, a count beyond the
                known tokens or the slots, or a sequence that is listed twice.
        """
        self._pool().tables.commit(plans)

    def close_sequences(self, sequence_ids: Iterable[str]) -> None:
        """Release the references of sequences. Ids that are not open are ignored."""
        if self._attached is not None:
            self._attached.tables.close(sequence_ids)

    def update(self, update: Update, epoch: int = 0) -> UpdateResult:
        """Apply commits, closes, extends and opens, each entry on its own.

        A refused entry changes nothing. Opens end at the first that finds no room; what they
        open belongs to the driver of this epoch (0: to no driver).

        Raises:
            LeaseLapsed: the epoch is not the present driver's.
            PoolNotAttached: there is nothing to change, unless the update only closes.
        """
        self._check_epoch(epoch)
        if self._attached is None and (update.commits or update.extends or update.opens):
            raise PoolNotAttached
        result = UpdateResult(extended=[], opened=[], refused=[])
        for commit in update.commits:
            try:
                self.commit_blocks((commit,))
            except KvStoreError as error:
                result.refused.append(_refusal(commit.sequence_id, error))
        self.close_sequences(update.closes)
        self._extend_each(update.extends, result)
        self._open_until_full(update.opens, epoch, result)
        return result

    def _extend_each(self, plans: Sequence[ExtendPlan], result: UpdateResult) -> None:
        try:  # nearly always there is room for all of them
            result.extended.extend(self.extend_sequences(plans))
        except KvStoreError:
            for plan in plans:
                try:
                    result.extended.extend(self.extend_sequences((plan,)))
                except KvStoreError as error:
                    result.refused.append(_refusal(plan.sequence_id, error))

    def _open_until_full(self, plans: Iterable[OpenPlan], epoch: int, result: UpdateResult) -> None:
        full: OutOfBlocks | None = None
        for plan in plans:
            if full is not None:
                result.refused.append(_refusal(plan.sequence_id, full))
                continue
            try:
                result.opened.extend(self.open_sequences((plan,), epoch))
            except OutOfBlocks as error:
                full = error
                result.refused.append(_refusal(plan.sequence_id, error))
            except KvStoreError as error:
                result.refused.append(_refusal(plan.sequence_id, error))

    # --- insight ------------------------------------------------------------

    def is_open(self, sequence_id: str) -> bool:
        return self._attached is not None and self._attached.tables.is_open(sequence_id)

    def list_sequences(
        self, page_size: int = 0, page_token: str = ""
    ) -> tuple[list[SequenceInfo], str]:
        """A page of the open sequences, oldest first, and the token of the next page.

        Raises:
            InvalidRequest: a size outside 0 to 1000, or a token that is not ours.
        """
        if not 0 <= page_size <= _MAX_PAGE_SIZE:
            raise InvalidRequest("page_size", f"{page_size} is not from 0 to {_MAX_PAGE_SIZE}")
        if page_token and not (page_token.isascii() and page_token.isdigit()):
            raise InvalidRequest("page_token", f"{page_token!r} is not from an earlier answer")
        if self._attached is None:
            return [], ""
        size = page_size or _DEFAULT_PAGE_SIZE
        infos, following = self._attached.tables.page(size, int(page_token or "0"))
        return infos, "" if following is None else str(following)

    def stats(self) -> PoolStats:
        """The counters at this instant; all 0 without a pool."""
        if self._attached is None:
            return PoolStats(0, 0, 0, 0, 0, 0, 0.0, 0, 0, 0)
        return self._attached.tables.stats()

    def audit(self) -> list[str]:
        """Check every invariant from scratch; what is wrong, in words. Slow."""
        return [] if self._attached is None else self._attached.tables.audit()

    # --- parts --------------------------------------------------------------

    def _pool(self) -> _Attached:
        if self._attached is None:
            raise PoolNotAttached
        return self._attached

    def _create_pool(self, shape: KvShape) -> _Attached:
        block_bytes = PoolLayout(shape, self._block_size, 1).block_bytes
        num_blocks = self._kv_memory_bytes // block_bytes
        if num_blocks < 1:
            raise NoRoomForPool(
                f"--kv-memory is {self._kv_memory_bytes} bytes and one block of "
                f"{self._block_size} tokens needs {block_bytes}",
                needed_bytes=block_bytes,
                available_bytes=self._kv_memory_bytes,
            )
        layout = PoolLayout(shape, self._block_size, num_blocks)
        memory = self._pool_factory(layout.pool_bytes)
        handle = PoolHandle(
            memory.name, memory.offset_bytes, layout.pool_bytes, layout, secrets.randbits(64)
        )
        return _Attached(handle, memory, PageTables(num_blocks, self._block_size, self._eviction))


def _check_shape(shape: KvShape) -> None:
    for name in ("num_layers", "num_kv_heads", "head_size"):
        if getattr(shape, name) < 1:
            raise InvalidRequest(f"shape.{name}", "must be at least 1")
    if shape.dtype not in DTYPE_BYTES:
        raise InvalidRequest("shape.dtype", f"{shape.dtype!r} is not one of {list(DTYPE_BYTES)}")


def _refusal(sequence_id: str, error: KvStoreError) -> Refusal:
    return Refusal(sequence_id, error.reason, str(error))
