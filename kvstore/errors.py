"""Errors of the page manager.

KvStoreError
├── InvalidRequest      a field is wrong; nothing was changed
│   ├── InvalidCommit
│   └── PromptExceedsPool
├── SequenceNotFound
├── SequenceExists
├── OutOfBlocks         try again when blocks were released
├── LeaseLapsed         somebody else is the driver
├── LayoutMismatch
├── PoolNotAttached
├── NoRoomForPool
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
        super().__init__("token_ids", f"need {needed} blocks, the pool has {total}")
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


class OutOfBlocks(KvStoreError):
    reason = "OUT_OF_BLOCKS"

    def __init__(self, *, needed: int, free: int) -> None:
        super().__init__(
            f"need {needed} blocks, {free} free",
            needed_block_count=needed,
            free_block_count=free,
        )


class LeaseLapsed(KvStoreError):
    reason = "LEASE_LAPSED"

    def __init__(self, *, epoch: int, present: int) -> None:
        super().__init__("another driver has taken over", epoch=epoch, present_epoch=present)


class LayoutMismatch(KvStoreError):
    reason = "LAYOUT_MISMATCH"


class PoolNotAttached(KvStoreError):
    reason = "POOL_NOT_ATTACHED"

    def __init__(self) -> None:
        super().__init__("no compute worker has attached a pool yet")


class NoRoomForPool(KvStoreError):
    reason = "NO_ROOM_FOR_POOL"


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
