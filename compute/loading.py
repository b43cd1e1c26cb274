"""From a model's files to a decoder that can run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from compute.config import ModelConfig
from compute.errors import ModelNotFound, ModelUnsupported
from compute.kernels import Kernels
from compute.model import LlamaDecoder
from compute.pool import torch_dtype
from compute.weights import Progress, Weights, fingerprint, open_source


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder, and the digest that says which model it is."""

    decoder: LlamaDecoder
    fingerprint: bytes


def read_config(directory: Path) -> ModelConfig:
    """The model's config.json.

    Raises:
        ModelNotFound: there is none, or it is not JSON.
        ModelUnsupported: it does not describe a model we can run.
    """
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelNotFound(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelNotFound(f"{path}: not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ModelUnsupported(f"{path}: not a JSON object")
    return ModelConfig.from_dict(raw)


def load_model(
    directory: Path,
    weights: Path,
    dtype: str,
    kernels: Kernels,
    progress: Progress = lambda _done, _total: None,
) -> LoadedModel:
    """Load the model whose configuration is in `directory`.

    `weights` is a GGUF file or a directory of safetensors; `dtype` is float32 or bfloat16.

    Raises what read_config, open_source and Weights raise.
    """
    config = read_config(directory)
    source = open_source(weights, config)
    decoder = LlamaDecoder(config, Weights(source, config, torch_dtype(dtype), progress), kernels)
    return LoadedModel(decoder, fingerprint(config, source.files))
