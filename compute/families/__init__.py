"""Model families as data: how each configuration reads, and how its checkpoints name things."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compute.config import ModelConfig
from compute.errors import ModelUnsupported
from compute.families import gemma, gpt, llama, names
from compute.families.fields import Raw
from compute.families.names import Names


@dataclass(frozen=True, slots=True)
class Family:
    """`read` raises ModelUnsupported for an option we cannot run, and for a field that is
    missing or of the wrong kind; the message names it."""

    read: Callable[[Raw], ModelConfig]
    names: Names


FAMILIES = {
    "llama": Family(llama.llama, names.LLAMA),
    "mistral": Family(llama.mistral, names.LLAMA),
    "qwen2": Family(llama.qwen2, names.LLAMA),
    "qwen3": Family(llama.qwen3, names.LLAMA),
    "phi3": Family(llama.phi3, names.PHI3),
    "gpt2": Family(gpt.gpt2, names.GPT2),
    "opt": Family(gpt.opt, names.OPT),
    "gpt_neox": Family(gpt.gpt_neox, names.GPT_NEOX),
    "gemma2": Family(gemma.gemma2, names.GEMMA),
    "gemma3_text": Family(gemma.gemma3, names.GEMMA),
}


def config_from(raw: Raw) -> ModelConfig:
    """Read a config.json, in the spelling of transformers 4 or 5.

    Raises:
        ModelUnsupported: a family or an option we cannot run, or a field that is missing
            or of the wrong kind; the message names it.
    """
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelUnsupported(f"model_type {name!r}: we run {', '.join(FAMILIES)}")
    if raw.get("quantization_config"):
        raise ModelUnsupported("quantization_config: quantized checkpoints are not supported")
    return FAMILIES[name].read(raw)


__all__ = ["FAMILIES", "Family", "config_from"]
