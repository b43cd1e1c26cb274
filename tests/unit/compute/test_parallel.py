"""Two processes that share a model draw what one draws."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from compute.errors import ModelUnsupported
from compute.families import config_from
from compute.families.names import expected_shapes
from compute.parallel import shard, share_of
from tests.unit.compute import families, ranks


@dataclasses.dataclass
class Rank:
    rank: int
    size: int


def _prompts() -> dict[str, list[int]]:
    rng = random.Random(3)
    lengths = {"a": 5, "b": 40, "c": 1, "d": 17}
    return {name: rng.choices(range(97), k=length) for name, length in lengths.items()}


# A head that is split; biases of columns; norms behind the sums, and a tied head.
@pytest.mark.parametrize("variant", ["llama", "opt", "gemma3"])
def test_two_ranks_draw_what_one_draws(variant, tmp_path):
    oracle = families.oracle_of(variant)
    oracle.save_pretrained(tmp_path)
    alone, (_, _, _, _, num_heads, _) = ranks.generate_alone(tmp_path, _prompts(), 12)
    both = ranks.generate_in_ranks(tmp_path, _prompts(), 12, 2)
    assert both[0] == both[1]  # to the last bit: nobody has to tell the other what was drawn
    made, shape = both[0]
    assert shape[4] == num_heads // 2
    for name, expected in alone.items():
        assert made[name].token_ids == expected.token_ids
        # fp32: sums in two parts
        assert made[name].logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize("variant", ["llama", "gpt2", "gpt_neox", "phi3", "gemma3"])
def test_shares_make_the_whole(variant):
    """Every row and column of a weight is on one rank, or each has all of it."""
    config = config_from(families.oracle_of(variant).config.to_dict())
    share = share_of(config, 2)
    generator = torch.Generator().manual_seed(0)
    for name, shape in expected_shapes(config).items():
        whole = torch.randn(shape, generator=generator)
        parts = [shard(name, whole, config, Rank(rank, 2)) for rank in range(2)]
        part = name.removesuffix(".bias").rpartition(".")[2]
        if part in ("o", "down") and name.endswith(".bias"):
            assert torch.equal(sum(parts), whole)
        elif part in ("o", "down"):
            assert torch.equal(torch.cat(parts, 1), whole)
        elif part in ("q", "k", "v", "gate", "up"):
            assert torch.equal(torch.cat(parts), whole)
        elif part != "head":
            assert all(torch.equal(each, whole) for each in parts)
        if part != "head":
            assert parts[0].shape == expected_shapes(share)[name]


def test_ranks_beyond_the_kv_heads_share_them():
    config = config_from(families.oracle_of("llama").config.to_dict())  # 4 and 2 heads of 16
    keys = torch.arange(32.0)[:, None].expand(32, 48)
    of_ranks = [shard("layers.0.k", keys, config, Rank(rank, 4))[:, 0] for rank in range(4)]
    assert [int(rows[0]) for rows in of_ranks] == [0, 0, 16, 16]
    assert {len(rows) for rows in of_ranks} == {16}
    assert share_of(config, 4).num_kv_heads == 1
    assert share_of(config, 4).num_q_heads == 1


@pytest.mark.parametrize("size", [3, 8])
def test_a_model_that_does_not_split_evenly_is_refused(size):
    config = config_from(families.oracle_of("llama").config.to_dict())  # 4 and 2 heads
    with pytest.raises(ModelUnsupported, match=f"into {size} equal parts"):
        share_of(config, size)
