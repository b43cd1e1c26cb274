"""Tiny random Llama models, with transformers as the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compute.config import ModelConfig
from compute.fakes import PrivatePool
from compute.kernels.reference import ReferenceKernels
from compute.model import LlamaDecoder
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
    decoder: LlamaDecoder
    kernels: ReferenceKernels

    def runner(self, pool: PrivatePool) -> StepRunner:
        return StepRunner(self.decoder, self.kernels, pool, model_id="tiny", fingerprint=b"\0" * 32)

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """The oracle's logits [T, V] in fp32."""
        with torch.inference_mode():
            return self.oracle(torch.tensor([token_ids])).logits[0].float()


@pytest.fixture
def make_model(tmp_path):
    """make_model(dtype, kernels, **overrides of TINY) -> TinyModel."""

    def make(dtype=torch.float32, kernels=None, **overrides) -> TinyModel:
        torch.manual_seed(7)
        config = LlamaConfig(**{**TINY, **overrides})
        oracle = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, parameter in oracle.named_parameters():
                if name.endswith(".bias"):
                    parameter.normal_(std=0.3)  # transformers starts them at zero
        oracle = oracle.to(dtype).eval()
        oracle.save_pretrained(tmp_path / "tiny")
        ours = ModelConfig.from_dict(config.to_dict())
        weights = Weights(open_source(tmp_path / "tiny", ours), ours, dtype)
        kernels = kernels or ReferenceKernels()
        return TinyModel(oracle, ours, LlamaDecoder(ours, weights, kernels), kernels)

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
