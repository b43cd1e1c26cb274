"""Pins: promises to keep a prefix, for as long as somebody renews them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.prefix_tree import Chain
from kvstore.types import Namespace


@dataclass(slots=True)
class Pin:
    """A lease on the whole blocks of a prefix.

    It holds those that are in the tree, and takes the others as they are computed.
    `expires_at` in seconds of the manager's clock.
    """

    pin_id: str
    owner: str
    tokens: array[int]  # of whole blocks
    priority: int
    expires_at: float
    chain: Chain
    block_ids: array[int]
    num_blocks: int  # when all of it is computed
    epoch: int = 0  # of the driver whose lease it ends with; 0: of none

    @property
    def namespace(self) -> Namespace:
        return self.chain.namespace

    @property
    def is_whole(self) -> bool:
        return len(self.block_ids) == self.num_blocks


class PinBook:
    """The pins of a pool. They hold blocks; see kvstore.pinning for how they get them."""

    def __init__(self) -> None:
        self._pins: dict[str, Pin] = {}
        self._waiting: dict[Namespace, dict[str, Pin]] = {}
        self._next_expiry = math.inf

    def __len__(self) -> int:
        return len(self._pins)

    def get(self, pin_id: str) -> Pin | None:
        return self._pins.get(pin_id)

    def all(self) -> list[Pin]:
        """Oldest first."""
        return list(self._pins.values())

    def put(self, pin: Pin) -> None:
        """Add a pin, or note that its lease or its blocks are other ones."""
        self._pins[pin.pin_id] = pin
        self._next_expiry = min(self._next_expiry, pin.expires_at)
        self._unwait(pin)
        if not pin.is_whole:
            self._waiting.setdefault(pin.namespace, {})[pin.pin_id] = pin

    def remove(self, pin: Pin) -> None:
        del self._pins[pin.pin_id]
        self._unwait(pin)

    def waiting(self, namespace: Namespace) -> Iterable[Pin]:
        """Those that lack blocks."""
        if not self._waiting:
            return ()
        return list(self._waiting.get(namespace, {}).values())

    def expired(self, now: float) -> list[Pin]:
        if now < self._next_expiry:
            return []
        over = [pin for pin in self._pins.values() if pin.expires_at <= now]
        rest = (pin.expires_at for pin in self._pins.values() if pin.expires_at > now)
        self._next_expiry = min(rest, default=math.inf)
        return over

    def weakest_first(self) -> list[Pin]:
        """In the order in which they give way."""
        return sorted(self._pins.values(), key=lambda pin: (pin.priority, pin.expires_at))

    def num_blocks(self, tenant: str | None = None) -> int:
        """Blocks that are promised, in all or to a tenant, counted for each pin."""
        pins = self._pins.values()
        return sum(p.num_blocks for p in pins if tenant in (None, p.namespace.tenant))

    def _unwait(self, pin: Pin) -> None:
        pins = self._waiting.get(pin.namespace)
        if pins is not None:
            pins.pop(pin.pin_id, None)
            if not pins:
                del self._waiting[pin.namespace]
