"""Which cached blocks go first: a policy per name."""

from __future__ import annotations

from kvstore.eviction.gdsf import Gdsf
from kvstore.eviction.lhd import Lhd
from kvstore.eviction.lru import Lru
from kvstore.eviction.policy import EvictionPolicy, PolicyFactory
from kvstore.eviction.s3_fifo import S3Fifo

POLICIES: dict[str, PolicyFactory] = {
    "gdsf": Gdsf,
    "lhd": Lhd,
    "lru": Lru,
    "s3-fifo": S3Fifo,
}
DEFAULT_POLICY = "lhd"

__all__ = ["DEFAULT_POLICY", "POLICIES", "EvictionPolicy", "PolicyFactory"]
