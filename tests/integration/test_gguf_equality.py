"""The real model's GGUF file gives the weights that transformers reads from it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from compute.families import FAMILIES
from compute.families.names import places
from compute.loading import read_config
from compute.weights import Weights, open_source


@pytest.fixture(scope="module")
def oracle(model_files) -> dict[str, torch.Tensor]:
    """transformers' tensors in fp32, by its names."""
    if model_files.weights.is_dir():
        pytest.skip("the model is not a GGUF file")
    config = AutoConfig.from_pretrained(model_files.directory)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    loaded = load_gguf_checkpoint(
        str(model_files.weights), return_tensors=True, model_to_load=model
    )
    return dict(loaded["tensors"])


def test_every_tensor_equals_the_oracles(oracle, model_files):
    config = read_config(model_files.directory)
    weights = Weights(open_source(model_files.weights, config), torch.float32)
    ours = places(config, FAMILIES[config.family].names)
    assert oracle.keys() == {place.stored for place in ours.values()}
    for name, place in ours.items():
        assert torch.equal(weights.take(name), torch.as_tensor(oracle[place.stored])), name
