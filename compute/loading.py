"""From a model's files to a decoder that can run."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compute.config import ModelConfig
from compute.dtypes import torch_dtype
from compute.errors import ModelNotFound, ModelUnsupported
from compute.families import config_from
from compute.kernels import Kernels
from compute.layer import Parts
from compute.model import Decoder
from compute.parallel import shard, share_of
from compute.weights import Progress, Weights, fingerprint, open_source


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder, and the digest that says which model it is."""

    decoder: Decoder
    fingerprint: bytes

    def fingerprint_with(self, draft: LoadedModel | None) -> bytes:
        """Of this model's KV and its draft model's, which share blocks. 32 bytes."""
        if draft is None:
            return self.fingerprint
        return hashlib.sha256(self.fingerprint + draft.fingerprint).digest()


def read_config(directory: Path) -> ModelConfig:
    """The model's config.json.

    Raises:
        ModelNotFound: there is none, or it is not JSON.
        ModelUnsupported: it does not describe a model we can run.
    """
    path = directory / "config.json"
    try:
        return config_from(_parsed(path, path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ModelNotFound(f"{path}: {error.strerror}") from None


def read_eos_ids(directory: Path) -> frozenset[int]:
    """The tokens that end an answer; models spread them over three files.

    Raises ModelNotFound: one of the files is not JSON.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        found |= {value} if isinstance(value, int) else set(value or ())
    named = _read_json(directory / "tokenizer_config.json").get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    added = _read_json(directory / "tokenizer.json").get("added_tokens", ())
    return frozenset(found.union(token["id"] for token in added if token["content"] == text))


def load_model(
    directory: Path,
    weights: Path,
    dtype: str,
    kernels: Kernels,
    progress: Progress = lambda _done, _total: None,
    parts: Parts | None = None,
) -> LoadedModel:
    """Load the model whose configuration is in `directory`, or this rank's share of it.

    `weights` is a GGUF file or a directory of safetensors; `dtype` is float32 or bfloat16.

    Raises what read_config, share_of, open_source and Weights raise.
    """
    parts = parts or Parts()
    config = read_config(directory)
    share = share_of(config, parts.group.size)
    source = open_source(weights, config)
    cut = functools.partial(shard, config=config, group=parts.group)
    taken = Weights(source, torch_dtype(dtype), progress, cut, parts.device)
    decoder = Decoder(share, taken, kernels, parts)
    return LoadedModel(decoder, fingerprint(config, source.files, parts.quantization))


def _read_json(path: Path) -> dict[str, Any]:
    """A file that may be missing. Raises what _parsed raises."""
    try:
        return _parsed(path, path.read_text(encoding="utf-8"))
    except OSError:
        return {}


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelNotFound(f"{path}: not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ModelUnsupported(f"{path}: not a JSON object")
    return raw
