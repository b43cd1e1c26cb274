"""Which cached blocks go first: a policy per name."""

from __future__ import annotations

from kvstore.eviction.lru import Lru
from kvstore.eviction.policy import EvictionPolicy, PolicyFactory

POLICIES: dict[str, PolicyFactory] = {
    "lru": Lru,
}
DEFAULT_POLICY = "lru"

__all__ = ["DEFAULT_POLICY", "POLICIES", "EvictionPolicy", "PolicyFactory"]
