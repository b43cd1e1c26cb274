"""Tiny random Llama models and checkpoints, with transformers as the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from compute.config import ModelConfig
from compute.fakes import PrivatePool
from compute.families import FAMILIES, config_from
from compute.families.names import expected_shapes, places
from compute.kernels.reference import ReferenceKernels
from compute.model import Decoder
from compute.runner import StepRunner
from compute.weights import Weights, open_source

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    # Larger than the usual 0.02, so that attention is far from uniform in so small a model.
    "initializer_range": 0.3,
}


@dataclass
class TinyModel:
    """The same weights in transformers and in our decoder."""

    oracle: LlamaForCausalLM
    config: ModelConfig
    decoder: Decoder
    kernels: ReferenceKernels

    def runner(self, pool: PrivatePool, **options) -> StepRunner:
        return StepRunner(
            self.decoder, self.kernels, pool, model_id="tiny", fingerprint=b"\0" * 32, **options
        )

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """The oracle's logits [T, V] in fp32."""
        with torch.inference_mode():
            return self.oracle(torch.tensor([token_ids])).logits[0].float()


def _fill_biases(model) -> None:
    """transformers starts them at zero, which would hide a bias that is not added."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=0.3)


@pytest.fixture
def make_model(tmp_path):
    """make_model(dtype, kernels, **overrides of TINY) -> TinyModel."""

    def make(dtype=torch.float32, kernels=None, **overrides) -> TinyModel:
        torch.manual_seed(7)
        config = LlamaConfig(**{**TINY, **overrides})
        oracle = LlamaForCausalLM(config)
        _fill_biases(oracle)
        oracle = oracle.to(dtype).eval()
        oracle.save_pretrained(tmp_path / "tiny")
        ours = config_from(config.to_dict())
        weights = Weights(open_source(tmp_path / "tiny", ours), dtype)
        kernels = kernels or ReferenceKernels()
        return TinyModel(oracle, ours, Decoder(ours, weights, kernels), kernels)

    return make


@pytest.fixture
def make_pool():
    """make_pool(num_blocks, block_size) -> PrivatePool, closed at the end of the test."""
    pools = []

    def make(num_blocks=64, block_size=16) -> PrivatePool:
        pools.append(PrivatePool(num_blocks=num_blocks, block_size=block_size))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


# Rows of 64, since quantized types come in blocks of 32.
CHECKPOINT = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@dataclass
class Checkpoint:
    """A saved random model: its safetensors, and what they hold by our names."""

    directory: Path
    config: ModelConfig
    tensors: dict[str, torch.Tensor]

    @property
    def file(self) -> Path:
        return self.directory / "model.safetensors"

    def change(self, change) -> None:
        """Rewrite the single file after `change` was applied to its tensors."""
        stored = load_file(self.file)
        change(stored)
        save_file(stored, self.file)

    def taken(self, path=None, dtype=torch.float32) -> dict[str, torch.Tensor]:
        """All that we read from `path`, by default the directory."""
        source = open_source(path or self.directory, self.config)
        weights = Weights(source, dtype)
        return {name: weights.take(name) for name in expected_shapes(self.config)}


@pytest.fixture
def make_checkpoint(tmp_path):
    """make_checkpoint(**changes of the configuration) -> Checkpoint."""

    def make(shard_size="5GB", **changes) -> Checkpoint:
        torch.manual_seed(3)
        model = LlamaForCausalLM(LlamaConfig(**{**CHECKPOINT, **changes}))
        _fill_biases(model)
        model.save_pretrained(tmp_path / "checkpoint", max_shard_size=shard_size)
        config = config_from(model.config.to_dict())
        stored = model.state_dict()
        found = places(config, FAMILIES["llama"].names)
        tensors = {name: stored[place.stored].clone() for name, place in found.items()}
        return Checkpoint(tmp_path / "checkpoint", config, tensors)

    return make


@pytest.fixture
def checkpoint(make_checkpoint) -> Checkpoint:
    return make_checkpoint()
