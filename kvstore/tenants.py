"""How many blocks each tenant has, may have, and is sure to have."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvstore.errors import InvalidRequest, OutOfBlocks, QuotaExceeded
from kvstore.eviction import EvictionPolicy
from kvstore.types import TenantLimits, TenantUsage

_NO_LIMITS = TenantLimits()


class Partition:
    """Blocks that compete for room among themselves: a limited tenant's, or all others'.

    `queue` are those of its nodes that may be evicted.
    """

    def __init__(self, limits: TenantLimits, queue: EvictionPolicy) -> None:
        self.floor = limits.floor
        self.queue = queue
        self.num_held = 0
        self.num_cached = 0

    @property
    def num_used(self) -> int:
        return self.num_held + self.num_cached


class Tenant:
    """What one tenant has of the page pool. Counts are of blocks."""

    def __init__(self, name: str, limits: TenantLimits, partition: Partition) -> None:
        self.name = name
        self.limits = limits
        self.partition = partition
        self.num_held = 0
        self.num_cached = 0
        self.num_pinned = 0
        self.num_prompt_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_used(self) -> int:
        return self.num_held + self.num_cached

    @property
    def is_idle(self) -> bool:
        """There is nothing to say of it."""
        is_limited = self.limits is not _NO_LIMITS
        return not (is_limited or self.num_used or self.num_prompt_tokens)

    def count(self, *, held: int = 0, cached: int = 0) -> None:
        """Add to the counters of the tenant and of its partition."""
        self.num_held += held
        self.num_cached += cached
        self.partition.num_held += held
        self.partition.num_cached += cached

    def usage(self) -> TenantUsage:
        return TenantUsage(
            tenant=self.name,
            floor=self.limits.floor,
            quota=self.limits.quota,
            num_held=self.num_held,
            num_cached=self.num_cached,
            num_pinned=self.num_pinned,
            num_prompt_tokens=self.num_prompt_tokens,
            num_hit_tokens=self.num_hit_tokens,
        )


class Tenants:
    """Who may have how many blocks of a pool.

    - floor: a tenant can always get to hold so many, and what it has up to that number
      is not evicted for others
    - quota: it never has more, held and cached together

    Tenants without limits share a partition. Invariant: the sum over all partitions of
    max(held, floor) is at most the number of blocks, which is what keeps floors free.
    """

    def __init__(
        self,
        num_blocks: int,
        limits: Mapping[str, TenantLimits],
        new_queue: Callable[[], EvictionPolicy],
    ) -> None:
        """Raises InvalidRequest for limits that contradict each other or the pool."""
        self._num_blocks = num_blocks
        _check_limits(num_blocks, limits)
        self._common = Partition(_NO_LIMITS, new_queue())
        self._by_name: dict[str, Tenant] = {}
        for name, its in limits.items():
            self._by_name[name] = Tenant(name, its, Partition(its, new_queue()))
        limited = [tenant.partition for tenant in self._by_name.values()]
        self.partitions = [self._common, *limited]
        # Limits are other ones than when blocks were taken: what they promise comes true
        # bit by bit, as sequences end.
        self.are_strained = False

    def get(self, name: str) -> Tenant:
        """The tenant of this name, known from now on."""
        tenant = self._by_name.get(name)
        if tenant is None:
            tenant = self._by_name[name] = Tenant(name, _NO_LIMITS, self._common)
        return tenant

    def all(self) -> list[Tenant]:
        return list(self._by_name.values())

    def most_blocks(self, tenant: Tenant) -> int:
        """What the tenant can have at most, when nobody else has more than a floor."""
        floors = sum(p.floor for p in self.partitions if p is not tenant.partition)
        quota = tenant.limits.quota
        most = self._num_blocks - floors
        return most if quota is None else min(most, quota)

    def check_room(self, needs: Mapping[Tenant, int], num_spare: int = 0) -> None:
        """Whether tenants can hold so many blocks more, all of them, and leave some to spare.

        What is spared would be theirs, too; nobody must spare what is within its floor.

        Raises:
            QuotaExceeded: a tenant would pass its quota.
            OutOfBlocks: others hold too many, or have a floor that must be left to them.
        """
        for tenant, needed in needs.items():
            quota = tenant.limits.quota
            if quota is not None and tenant.num_held + needed > quota:
                raise QuotaExceeded(tenant.name, needed=needed, held=tenant.num_held, quota=quota)
        held = {partition: partition.num_held for partition in self.partitions}
        for tenant, needed in needs.items():
            held[tenant.partition] += needed
        excess = self._promised(held) - self._num_blocks
        needed = sum(needs.values())
        if excess > 0 and not (self.are_strained and self._can_have(needs)):
            raise OutOfBlocks(needed=needed, free=max(0, needed - excess))
        if excess > -num_spare and any(held[t.partition] > t.partition.floor for t in needs):
            raise OutOfBlocks(needed=needed, free=max(0, needed - excess - num_spare))

    def note_strain(self) -> None:
        """Blocks were counted that other limits have let tenants have."""
        held = {partition: partition.num_held for partition in self.partitions}
        over_quota = any(
            tenant.limits.quota is not None and tenant.num_used > tenant.limits.quota
            for tenant in self._by_name.values()
        )
        self.are_strained = over_quota or self._promised(held) > self._num_blocks

    def _promised(self, held: Mapping[Partition, int]) -> int:
        return sum(max(count, partition.floor) for partition, count in held.items())

    def _can_have(self, needs: Mapping[Tenant, int]) -> bool:
        """While floors are over the pool: who is below its own gets what there is."""
        if len(needs) != 1:
            return False
        [(tenant, needed)] = needs.items()
        free = self._num_blocks - sum(partition.num_used for partition in self.partitions)
        for partition in self.partitions:
            is_own = partition is tenant.partition
            most = partition.num_used if is_own else partition.num_used - partition.floor
            free += max(0, min(partition.num_cached, most))
        return tenant.partition.num_held + needed <= tenant.partition.floor and needed <= free

    def over_quota(self, tenant: Tenant, num_blocks: int) -> int:
        """How many of its cached blocks must go before it gets `num_blocks` more."""
        quota = tenant.limits.quota
        return 0 if quota is None else max(0, tenant.num_used + num_blocks - quota)

    def victim(self, tenant: Tenant) -> tuple[Partition, int]:
        """Whose cached blocks should go for a tenant, and how many of them may.

        Among those with cached blocks above their floor, the one that is furthest above
        it: room is made by whoever has most of what is nobody's due. A tenant's own
        blocks are not protected from itself.
        """
        best, best_key, best_count = None, (0, 0), 0
        for partition in self.partitions:
            excess = partition.num_used - partition.floor
            count = partition.num_cached
            if partition is not tenant.partition:
                count = min(count, excess)
            key = (excess + self._num_blocks, count)
            if count > 0 and key > best_key:
                best, best_key, best_count = partition, key, count
        if best is None:
            raise AssertionError("blocks were promised that nobody can give")
        return best, best_count

    def forget_idle(self) -> None:
        """Drop tenants without limits that have nothing, so that names do not pile up."""
        idle = [
            name
            for name, tenant in self._by_name.items()
            if tenant.limits is _NO_LIMITS and not tenant.num_used
        ]
        for name in idle:
            del self._by_name[name]


def _check_limits(num_blocks: int, limits: Mapping[str, TenantLimits]) -> None:
    for name, its in limits.items():
        if its.floor < 0 or (its.quota is not None and its.quota < max(1, its.floor)):
            raise InvalidRequest(
                "tenants", f"{name!r}: 0 <= floor <= quota and quota >= 1, not {its}"
            )
    floors = sum(its.floor for its in limits.values())
    if floors > num_blocks:
        raise InvalidRequest("tenants", f"floors add up to {floors} of {num_blocks} blocks")
