"""Tensor parallelism: each rank of a group has some of the heads and of the MLP's columns.

Queries, keys, values and what widens the MLP are split by rows of their weights, so that a
rank computes whole heads; what comes after them is split by columns, so that each rank has a
part of every sum, and the parts are added up. Embedding and norms are on every rank; the head
is split by rows where it can be. A rank keeps the KV of its own heads in a pool of its own,
with the same block ids in all of them.

Source: Shoeybi et al. 2019, arXiv:1909.08053.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Protocol

import torch
from torch import distributed

from compute.config import ModelConfig
from compute.errors import ModelUnsupported

_ROWS = ("q", "k", "v", "gate", "up", "head")
_COLUMNS = ("o", "down")


class Group(Protocol):
    """The ranks that compute one model together. Every rank makes the same calls."""

    @property
    def rank(self) -> int:
        """From 0 on."""

    @property
    def size(self) -> int: ...

    def add_up(self, parts: torch.Tensor) -> None:
        """Replace each rank's tensor by the sum of all, which has the same bits on each."""

    def side_by_side(self, parts: torch.Tensor) -> torch.Tensor:
        """[T, n] of each rank -> [T, size * n], in the order of ranks."""


class Alone:
    """A group of one."""

    rank, size = 0, 1

    def add_up(self, parts: torch.Tensor) -> None:
        pass

    def side_by_side(self, parts: torch.Tensor) -> torch.Tensor:
        return parts


class ProcessGroup:
    """Processes that torch.distributed connects: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, address: str, rank: int, size: int, *, backend: str = "gloo") -> None:
        """Meet the others at `address`, tcp://HOST:PORT or file:///PATH; waits for all.

        Raises what torch.distributed raises if they do not come within a minute.
        """
        distributed.init_process_group(
            backend,
            init_method=address,
            rank=rank,
            world_size=size,
            timeout=timedelta(minutes=1),
        )
        self.rank, self.size = rank, size

    def add_up(self, parts: torch.Tensor) -> None:
        distributed.all_reduce(parts)

    def side_by_side(self, parts: torch.Tensor) -> torch.Tensor:
        every = [torch.empty_like(parts) for _ in range(self.size)]
        distributed.all_gather(every, parts)
        return torch.cat(every, dim=1)

    def close(self) -> None:
        distributed.destroy_process_group()


def share_of(config: ModelConfig, size: int) -> ModelConfig:
    """What each of `size` ranks computes. Raises ModelUnsupported if it cannot be split."""
    if size == 1:
        return config
    heads, kv_heads = config.num_q_heads, config.num_kv_heads
    if heads % size or config.intermediate_size % size or (kv_heads % size and size % kv_heads):
        raise ModelUnsupported(
            f"{heads} query heads, {kv_heads} KV heads and an MLP of {config.intermediate_size} "
            f"do not split into {size} equal parts"
        )
    return dataclasses.replace(
        config,
        num_q_heads=heads // size,
        # Fewer KV heads than ranks: some ranks have the same one.
        num_kv_heads=max(kv_heads // size, 1),
        intermediate_size=config.intermediate_size // size,
    )


def splits_head(config: ModelConfig, size: int) -> bool:
    """Whether each rank has some rows of the head; a tied one is needed whole for lookups."""
    return not config.tie_word_embeddings and config.vocab_size % size == 0


def shard(name: str, tensor: torch.Tensor, config: ModelConfig, group: Group) -> torch.Tensor:
    """The rank's part of one of the model's tensors; `config` is of the whole model."""
    is_bias = name.endswith(".bias")
    part = name.removesuffix(".bias").rpartition(".")[2]
    if part == "head" and not splits_head(config, group.size):
        return tensor
    if part in ("k", "v"):
        return _kv_rows(tensor, config, group)
    if part in _ROWS:
        return tensor.chunk(group.size, dim=0)[group.rank]
    if part in _COLUMNS and is_bias:
        # The parts are added up, and a bias counts once.
        return tensor if group.rank == 0 else torch.zeros_like(tensor)
    if part in _COLUMNS:
        return tensor.chunk(group.size, dim=1)[group.rank]
    return tensor


def _kv_rows(tensor: torch.Tensor, config: ModelConfig, group: Group) -> torch.Tensor:
    first = group.rank * config.num_kv_heads // group.size
    count = max(config.num_kv_heads // group.size, 1)
    return tensor[first * config.head_size : (first + count) * config.head_size]
