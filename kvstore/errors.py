"""Errors of the page manager.

KvStoreError
├── InvalidRequest      a field is wrong; nothing was changed
│   ├── InvalidCommit
│   └── PromptExceedsPool
├── SequenceNotFound
├── SequenceExists
├── ForeignSequence     another driver's, or another client's
├── SequenceSuspended   resume it first
├── SequenceNotSuspended
├── PinNotFound
├── PinExists
├── PinBudgetExceeded   try again when other pins have ended
├── OutOfBlocks         try again when blocks were released
├── QuotaExceeded       try again when the tenant has released some
├── LeaseLapsed         somebody else is the driver
├── LayoutMismatch
├── PoolNotAttached
├── NoRoomForPool
├── CudaUnavailable     no CuPy, no such device, or one that fails
├── EventsTooOld        take a snapshot instead
└── TooManyWatchers
"""

from __future__ import annotations


class KvStoreError(Exception):
    """Base of all errors of this package. `reason` is stable; the text is for people."""

    reason = "KVSTORE_ERROR"

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidRequest(KvStoreError):
    reason = "INVALID_REQUEST"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", field=field)


class InvalidCommit(InvalidRequest):
    reason = "INVALID_COMMIT"


class PromptExceedsPool(InvalidRequest):
    reason = "PROMPT_EXCEEDS_POOL"

    def __init__(self, *, needed: int, total: int) -> None:
        super().__init__("token_ids", f"need {needed} blocks, {total} can be had at most")
        self.metadata |= {"needed_block_count": str(needed), "total_block_count": str(total)}


class SequenceNotFound(KvStoreError):
    reason = "SEQUENCE_NOT_FOUND"

    def __init__(self, sequence_id: str) -> None:
        super().__init__(f"no open sequence {sequence_id!r}", sequence_id=sequence_id)


class SequenceExists(KvStoreError):
    reason = "SEQUENCE_EXISTS"

    def __init__(self, sequence_id: str) -> None:
        super().__init__(
            f"sequence {sequence_id!r} is open with other tokens", sequence_id=sequence_id
        )


class ForeignSequence(KvStoreError):
    reason = "FOREIGN_SEQUENCE"

    def __init__(self, sequence_id: str) -> None:
        super().__init__(
            f"sequence {sequence_id!r} is another driver's or client's", sequence_id=sequence_id
        )


class SequenceSuspended(KvStoreError):
    reason = "SEQUENCE_SUSPENDED"

    def __init__(self, sequence_id: str) -> None:
        super().__init__(f"sequence {sequence_id!r} is suspended", sequence_id=sequence_id)


class SequenceNotSuspended(KvStoreError):
    reason = "SEQUENCE_NOT_SUSPENDED"

    def __init__(self, sequence_id: str) -> None:
        super().__init__(f"sequence {sequence_id!r} is not suspended", sequence_id=sequence_id)


class PinNotFound(KvStoreError):
    reason = "PIN_NOT_FOUND"

    def __init__(self, pin_id: str) -> None:
        super().__init__(f"no pin {pin_id!r}", pin_id=pin_id)


class PinExists(KvStoreError):
    reason = "PIN_EXISTS"

    def __init__(self, pin_id: str) -> None:
        super().__init__(f"pin {pin_id!r} is for another prefix or owner", pin_id=pin_id)


class PinBudgetExceeded(KvStoreError):
    reason = "PIN_BUDGET_EXCEEDED"

    def __init__(self, tenant: str, *, needed: int, pinned: int, budget: int) -> None:
        super().__init__(
            f"the pin needs {needed} blocks; tenant {tenant!r} has {pinned} pinned, and at most "
            f"{budget} may be",
            tenant=tenant,
            needed_block_count=needed,
            pinned_block_count=pinned,
            budget_block_count=budget,
        )


class OutOfBlocks(KvStoreError):
    reason = "OUT_OF_BLOCKS"

    def __init__(self, *, needed: int, free: int) -> None:
        super().__init__(
            f"need {needed} blocks, {free} can be had now",
            needed_block_count=needed,
            free_block_count=free,
        )


class QuotaExceeded(KvStoreError):
    reason = "QUOTA_EXCEEDED"

    def __init__(self, tenant: str, *, needed: int, held: int, quota: int) -> None:
        super().__init__(
            f"tenant {tenant!r} holds {held} of {quota} blocks and needs {needed} more",
            tenant=tenant,
            needed_block_count=needed,
            held_block_count=held,
            quota_block_count=quota,
        )
        self.tenant = tenant


class LeaseLapsed(KvStoreError):
    reason = "LEASE_LAPSED"

    def __init__(self, *, epoch: int, present: int) -> None:
        text = "another driver has taken over" if present else "there is no driver's lease"
        super().__init__(text, epoch=epoch, present_epoch=present)


class LayoutMismatch(KvStoreError):
    reason = "LAYOUT_MISMATCH"


class PoolNotAttached(KvStoreError):
    reason = "POOL_NOT_ATTACHED"

    def __init__(self) -> None:
        super().__init__("no compute worker has attached a pool yet")


class NoRoomForPool(KvStoreError):
    reason = "NO_ROOM_FOR_POOL"


class CudaUnavailable(KvStoreError):
    reason = "CUDA_UNAVAILABLE"


class EventsTooOld(KvStoreError):
    reason = "EVENTS_TOO_OLD"

    def __init__(self, *, after: int, oldest: int) -> None:
        super().__init__(
            f"events after number {after} are asked for, the oldest that is kept is {oldest}",
            after_number=after,
            oldest_number=oldest,
        )


class TooManyWatchers(KvStoreError):
    reason = "TOO_MANY_WATCHERS"

    def __init__(self, *, limit: int) -> None:
        super().__init__(f"{limit} watch the pool already", limit=limit)
