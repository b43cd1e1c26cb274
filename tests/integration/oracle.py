"""The real model in transformers, with the weights that transformers itself reads."""

from __future__ import annotations

import torch
from transformers import AutoConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from services.common.model_files import ModelFiles


def load_oracle(model_files: ModelFiles) -> LlamaForCausalLM:
    """In fp32."""
    config = AutoConfig.from_pretrained(model_files.directory)
    if model_files.weights.is_dir():
        model = LlamaForCausalLM.from_pretrained(model_files.weights, dtype=torch.float32)
    else:
        model = LlamaForCausalLM(config).float()
        loaded = load_gguf_checkpoint(
            str(model_files.weights), return_tensors=True, model_to_load=model
        )
        missing, extra = model.load_state_dict(loaded["tensors"], strict=False)
        assert not extra
        assert set(missing) <= {"lm_head.weight"}
        model.tie_weights()
    return model.eval()
