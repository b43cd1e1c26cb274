"""A pool in use: made anew, taken over from an earlier manager, or put right."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvstore import journal, recovery
from kvstore.block_pool import BlockPool
from kvstore.errors import InvalidRequest, KvStoreError, NoRoomForPool
from kvstore.eviction import DEFAULT_POLICY
from kvstore.frame_records import FrameRecords, size_bytes
from kvstore.journal import Journal
from kvstore.kill_points import Reached
from kvstore.ports import Exported, PoolMemory, PoolStorage
from kvstore.recovery import Recovered
from kvstore.state import PoolState
from kvstore.swap_costs import SwapCosts
from kvstore.types import (
    DTYPE_BYTES,
    QUANTIZED,
    KvShape,
    PoolHandle,
    PoolLayout,
    PoolOptions,
    TenantLimits,
)

# A block has 8 tokens at least, so that its elements then end at a multiple of 64 bytes,
# where their scales begin.
_QUANTIZED_HEAD_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """`kv_memory_bytes` is the size of the pool that the first attachment creates.

    With a `kv_memory_share`, above 0 and up to 1, the size is that share of what is free
    then, and the bytes do not count. Pins may take these shares of its blocks, in all and
    of one tenant.
    """

    kv_memory_bytes: int
    block_size: int
    host_memory_bytes: int = 0
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    pin_share: float = 0.5
    tenant_pin_share: float = 0.5
    eviction: str = DEFAULT_POLICY
    kv_memory_share: float = 0.0


@dataclass(slots=True)
class Attached:
    """Where a pool is, and who holds what in it."""

    handle: PoolHandle
    host_handle: PoolHandle | None
    memory: PoolMemory
    journal: Journal
    state: PoolState


def create(
    options: ManagerOptions, storage: PoolStorage, shape: KvShape, reached: Reached
) -> Attached:
    """A new pool, all of it free. Raises NoRoomForPool, CudaUnavailable, InvalidRequest."""
    block_bytes = PoolLayout(shape, options.block_size, 1).block_bytes
    memory_bytes = options.kv_memory_bytes
    if options.kv_memory_share:
        memory_bytes = int(options.kv_memory_share * storage.free_bytes())
    num_blocks = memory_bytes // block_bytes
    if num_blocks < 1:
        raise NoRoomForPool(
            f"--kv-memory is {memory_bytes} bytes and one block of "
            f"{options.block_size} tokens needs {block_bytes}",
            needed_bytes=block_bytes,
            available_bytes=memory_bytes,
        )
    layout = PoolLayout(shape, options.block_size, num_blocks)
    num_host_blocks = options.host_memory_bytes // block_bytes
    num_frames = num_blocks + num_host_blocks
    memory = storage.create(layout, num_host_blocks, size_bytes(num_frames, layout.block_size))
    try:
        found = Recovered(layout, num_host_blocks, secrets.randbits(64))
        return _attach(options, memory, Journal(memory.journal, reached), found, reached)
    except BaseException:
        memory.close()
        raise


def recover(
    options: ManagerOptions, storage: PoolStorage, reached: Reached
) -> tuple[Attached | None, Recovered | None, str]:
    """What an earlier manager has left, and what became of it, in words.

    A pool that does not fit the options is released.

    Raises:
        InvalidRequest: limits of tenants contradict the pool. It is left as it was.
    """
    memory = storage.recover()
    if memory is None:
        return None, None, ""
    try:
        found = recovery.replay(memory.journal.records())
        _check_fits(options, found)
        attached = _attach(options, memory, Journal(memory.journal, reached), found, reached)
    except InvalidRequest:  # the options are wrong, not what was left
        memory.leave()
        raise
    except (ValueError, KvStoreError) as error:
        memory.close()
        return None, None, f"an earlier pool was given up: {error}"
    stats = attached.state.blocks.frames
    return (
        attached,
        found,
        (
            f"took over {len(attached.state.sequences)} of {len(found.sequences)} sequences "
            f"and {stats.num_cached} cached blocks"
        ),
    )


def repair(options: ManagerOptions, attached: Attached, reached: Reached) -> None:
    """Derive everything again from the sequences, the pins and the frame records."""
    before = attached.state
    found = recovery.found_in(before)
    found.layout, found.generation = attached.handle.layout, attached.handle.generation
    found.num_host_blocks = before.blocks.host.num_blocks
    attached.state = _attach(options, attached.memory, attached.journal, found, reached).state
    attached.state.carry_over(before)


def _attach(
    options: ManagerOptions,
    memory: PoolMemory,
    its_journal: Journal,
    found: Recovered,
    reached: Reached,
) -> Attached:
    layout = found.layout
    assert layout is not None
    handle, host_handle = _handles(memory, layout, found)
    num_frames = layout.num_blocks + found.num_host_blocks
    blocks = BlockPool(
        FrameRecords(num_frames, layout.block_size, memory.frame_records),
        num_host_blocks=found.num_host_blocks,
        limits=options.tenants,
        eviction=options.eviction,
        reached=reached,
    )
    pool_options = PoolOptions(
        most_pinned=int(layout.num_blocks * options.pin_share),
        most_pinned_by_tenant=int(layout.num_blocks * options.tenant_pin_share),
    )
    costs = SwapCosts(layout.shape.token_bytes, layout.block_size)
    state = PoolState(blocks, its_journal, pool_options, costs)
    # Set before, since a number that frame records name must be on paper even if we are
    # killed in between.
    blocks.on_root = its_journal.namespace
    recovery.rebuild(state, found)

    def snapshot() -> Iterable[bytes]:
        yield journal.pool_record(handle, found.num_host_blocks)
        yield from recovery.snapshot(state)

    its_journal.snapshot = snapshot
    its_journal.rewrite()
    return Attached(handle, host_handle, memory, its_journal, state)


def _handles(
    memory: PoolMemory, layout: PoolLayout, found: Recovered
) -> tuple[PoolHandle, PoolHandle | None]:
    handle = _handle(memory.export(), layout, found.generation)
    exported = memory.export_host()
    if exported is None:
        return handle, None
    host = PoolLayout(layout.shape, layout.block_size, found.num_host_blocks)
    return handle, _handle(exported, host, found.generation)


def _handle(exported: Exported, layout: PoolLayout, generation: int) -> PoolHandle:
    memory, offset_bytes = exported
    return PoolHandle(memory, offset_bytes, layout.pool_bytes, layout, generation)


def _check_fits(options: ManagerOptions, found: Recovered) -> None:
    """Raises ValueError unless the options would give the same pool."""
    layout = found.layout
    if layout is None:
        raise ValueError("its journal is empty")
    wanted = (
        options.block_size,
        options.kv_memory_bytes // layout.block_bytes,
        options.host_memory_bytes // layout.block_bytes,
    )
    present = (layout.block_size, layout.num_blocks, found.num_host_blocks)
    if wanted != present:
        raise ValueError(f"it has block size, blocks, host blocks {present}, wanted {wanted}")


def check_shape(shape: KvShape) -> None:
    """Raises InvalidRequest for a dimension below 1, an unknown dtype, or scales that would
    not be aligned."""
    for name, value in (
        ("layer_count", shape.num_layers),
        ("kv_head_count", shape.num_kv_heads),
        ("head_size", shape.head_size),
    ):
        if value < 1:
            raise InvalidRequest(f"shape.{name}", "must be at least 1")
    if shape.dtype not in DTYPE_BYTES:
        raise InvalidRequest("shape.dtype", f"{shape.dtype!r} is not one of {list(DTYPE_BYTES)}")
    if shape.dtype in QUANTIZED and shape.head_size % _QUANTIZED_HEAD_MULTIPLE:
        raise InvalidRequest(
            "shape.head_size",
            f"must be a multiple of {_QUANTIZED_HEAD_MULTIPLE} for KV in {shape.dtype}",
        )
