"""The real model's GGUF file gives the weights that transformers reads from it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from compute.loading import read_config
from compute.weights import Weights, open_source
from compute.weights.names import expected_shapes, from_hugging_face


@pytest.fixture(scope="module")
def oracle(model_files) -> dict[str, torch.Tensor]:
    """transformers' tensors in fp32, by our names."""
    if model_files.weights.is_dir():
        pytest.skip("the model is not a GGUF file")
    config = AutoConfig.from_pretrained(model_files.directory)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    loaded = load_gguf_checkpoint(
        str(model_files.weights), return_tensors=True, model_to_load=model
    )
    return {from_hugging_face(name): tensor for name, tensor in loaded["tensors"].items()}


def test_every_tensor_equals_the_oracles(oracle, model_files):
    config = read_config(model_files.directory)
    weights = Weights(open_source(model_files.weights, config), config, torch.float32)
    assert oracle.keys() == expected_shapes(config).keys()
    for name in oracle:
        assert torch.equal(weights.take(name), torch.as_tensor(oracle[name])), name
