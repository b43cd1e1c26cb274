"""Checkpoints: find the tensors, check them, read them, tell them apart."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from compute.config import ModelConfig
from compute.weights.gguf import GgufSource
from compute.weights.safetensors import SafetensorsSource
from compute.weights.source import Progress, Weights, WeightSource


def open_source(path: Path, config: ModelConfig) -> WeightSource:
    """The checkpoint at `path`: a GGUF file or a directory of safetensors.

    Raises what the two sources raise.
    """
    if path.is_dir():
        return SafetensorsSource(path, config)
    return GgufSource(path, config)


def fingerprint(config: ModelConfig, files: Iterable[Path], quantization: str = "none") -> bytes:
    """SHA-256 over the configuration, what is done to the weights, and every byte of the
    files, by name. 32 bytes.

    Two models share KV only if their fingerprints are equal. Names and places of the
    files have no part in it, their order by name has.
    """
    described = json.dumps([dataclasses.asdict(config), quantization], sort_keys=True)
    total = hashlib.sha256(described.encode())
    for path in sorted(files, key=lambda path: path.name):
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.digest()


__all__ = ["Progress", "WeightSource", "Weights", "fingerprint", "open_source"]
