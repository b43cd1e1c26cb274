"""Safetensors: read as transformers writes them, or refused with tensor or file named."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch

from compute.errors import ModelNotFound, ModelUnsupported, WeightsInvalid
from compute.families.names import expected_shapes
from compute.weights import Weights, open_source


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"shard_size": "40KB"},
    ],
)
def test_safetensors_give_the_tensors_of_the_checkpoint(make_checkpoint, changes):
    checkpoint = make_checkpoint(**changes)
    assert (len(list(checkpoint.directory.glob("*.safetensors"))) > 1) == ("shard_size" in changes)
    got, expected = checkpoint.taken(), checkpoint.tensors
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def test_tensors_are_converted_and_private(checkpoint):
    stored = checkpoint.file.read_bytes()
    got = checkpoint.taken(dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in got.values()} == {torch.bfloat16}
    expected = checkpoint.tensors["embedding"].bfloat16()
    assert torch.equal(got["embedding"], expected)
    same_type = checkpoint.taken()["embedding"]
    same_type.fill_(0)
    assert checkpoint.file.read_bytes() == stored
    assert torch.equal(checkpoint.taken()["embedding"].bfloat16(), expected)


def test_progress_counts_every_tensor_once(checkpoint):
    seen = []
    source = open_source(checkpoint.directory, checkpoint.config)
    weights = Weights(source, torch.float32, lambda done, total: seen.append((done, total)))
    for name in expected_shapes(checkpoint.config):
        weights.take(name)
    total = len(expected_shapes(checkpoint.config))
    assert seen == [(n, total) for n in range(1, total + 1)]


def test_a_missing_tensor_is_named(checkpoint):
    checkpoint.change(lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WeightsInvalid, match=r"missing: model\.layers\.1\.mlp\.up_proj") as caught:
        checkpoint.taken()
    assert caught.value.metadata == {"tensor": "model.layers.1.mlp.up_proj.weight"}


def test_an_extra_tensor_is_named(checkpoint):
    checkpoint.change(lambda tensors: tensors.update({"adapter.weight": torch.zeros(3)}))
    with pytest.raises(WeightsInvalid, match=r"of no use: adapter\.weight"):
        checkpoint.taken()


def test_a_layer_too_many_is_an_extra_tensor(make_checkpoint):
    checkpoint = make_checkpoint(num_hidden_layers=3)
    checkpoint.config = dataclasses.replace(checkpoint.config, layers=checkpoint.config.layers[:2])
    with pytest.raises(WeightsInvalid, match=r"of no use: model\.layers\.2\..* and 6 more"):
        checkpoint.taken()


def test_a_misshaped_tensor_is_named_with_both_shapes(checkpoint):
    name = "model.layers.0.self_attn.k_proj.weight"
    checkpoint.change(lambda tensors: tensors.update({name: torch.zeros(31, 64)}))
    with pytest.raises(WeightsInvalid, match=r"k_proj\.weight' has shape \[31, 64\].*\[32, 64\]"):
        checkpoint.taken()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(checkpoint, bad):

    def spoil(tensors):
        tensors["model.norm.weight"][7] = bad

    checkpoint.change(spoil)
    with pytest.raises(
        WeightsInvalid, match=r"'model\.norm\.weight' holds values that are not finite"
    ):
        checkpoint.taken()


def test_a_type_without_arithmetic_is_unsupported(checkpoint):
    name = "model.norm.weight"
    checkpoint.change(lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(ModelUnsupported, match=r"model\.norm\.weight.*I8"):
        checkpoint.taken()


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_a_truncated_safetensors_file_is_named(checkpoint, keep):
    path = checkpoint.file
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(WeightsInvalid, match=r"model\.safetensors: truncated or corrupt"):
        checkpoint.taken()


def test_no_prefix_of_a_safetensors_file_is_a_model(checkpoint):
    path = checkpoint.file
    whole = path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    points = [*range(0, header_end, 5), *random.Random(0).sample(range(len(whole)), 100)]
    for keep in points:
        path.write_bytes(whole[:keep])
        with pytest.raises(WeightsInvalid, match=r"model\.safetensors"):
            open_source(checkpoint.directory, checkpoint.config)


def test_a_safetensors_file_with_garbage_in_its_header_is_refused_or_read_right(checkpoint):
    path, expected = checkpoint.file, checkpoint.tensors
    whole = path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    num_refused = 0
    for at in range(0, header_end, 13):
        path.write_bytes(whole[:at] + b"\xff" * 3 + whole[at + 3 :])
        try:
            got = checkpoint.taken()
        except (WeightsInvalid, ModelUnsupported):
            num_refused += 1
        else:
            assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert num_refused > 20


def test_a_value_too_large_for_the_type_of_the_model_is_refused(checkpoint):
    largest = torch.finfo(torch.float32).max

    def enlarge(tensors):
        tensors["model.norm.weight"][7] = largest

    checkpoint.change(enlarge)
    assert checkpoint.taken()["norm"][7] == largest
    with pytest.raises(
        WeightsInvalid, match=r"'model\.norm\.weight' holds values that are not finite"
    ):
        checkpoint.taken(dtype=torch.bfloat16)


def test_frequencies_stored_by_old_exports_are_ignored(checkpoint):
    old = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.zeros(8) for n in range(2)}
    checkpoint.change(lambda tensors: tensors.update(old))
    assert torch.equal(checkpoint.taken()["norm"], checkpoint.tensors["norm"])


def test_a_tied_head_that_is_stored_too_must_be_the_embedding(make_checkpoint):
    checkpoint = make_checkpoint(tie_word_embeddings=True)
    embedding = checkpoint.tensors["embedding"]
    checkpoint.change(lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    assert "head" not in checkpoint.taken()
    checkpoint.change(lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(WeightsInvalid, match=r"lm_head\.weight differs"):
        checkpoint.taken()


def test_a_directory_without_weights_is_not_a_model(tmp_path, checkpoint):
    with pytest.raises(ModelNotFound, match=r"no \*\.safetensors"):
        open_source(tmp_path, checkpoint.config)


# Shards


@pytest.fixture
def sharded(make_checkpoint):
    return make_checkpoint(shard_size="40KB")


def _index(directory):
    return directory / "model.safetensors.index.json"


def test_a_missing_shard_is_named(sharded):
    shard = sorted(sharded.directory.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(WeightsInvalid, match=shard.name):
        open_source(sharded.directory, sharded.config)


def test_a_truncated_shard_is_named(sharded):
    shard = sorted(sharded.directory.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(WeightsInvalid, match=f"{shard.name}: truncated"):
        open_source(sharded.directory, sharded.config)


def test_a_tensor_that_its_shard_lacks_is_named(sharded):
    index = json.loads(_index(sharded.directory).read_text())
    files = sorted(set(index["weight_map"].values()))
    first, last = files[0], files[-1]
    name = next(name for name, file in index["weight_map"].items() if file == first)
    index["weight_map"][name] = last
    _index(sharded.directory).write_text(json.dumps(index))
    with pytest.raises(WeightsInvalid, match=f"{last}: tensor '{name}' is missing"):
        open_source(sharded.directory, sharded.config)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": []}',
        '{"weight_map": {"a": 7}}',
        '{"weight_map": {"a": ""}}',
        '{"weight_map": {"a": ".."}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": "../checkpoint/model.safetensors"}}',
        '{"weight_map": {"a": "b\\u0000.safetensors"}}',
    ],
)
def test_an_index_that_is_none_is_refused(sharded, text):
    _index(sharded.directory).write_text(text)
    with pytest.raises(WeightsInvalid, match=r"index\.json"):
        open_source(sharded.directory, sharded.config)


def test_several_files_without_an_index_are_refused(sharded):
    _index(sharded.directory).unlink()
    with pytest.raises(WeightsInvalid, match="several"):
        open_source(sharded.directory, sharded.config)
