"""Writes the tokenizer, chat template and configuration of a GGUF file as a directory.

Run as a program, since it needs libraries that its callers should not keep in memory:
`python -m services.common.gguf_metadata FILE.gguf DIRECTORY`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def write(gguf: Path, target: Path) -> None:
    """Fill `target` with config.json, tokenizer.json, tokenizer_config.json and,
    if the file has one, chat_template.jinja."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the file
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoConfig, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)
    AutoConfig.from_pretrained(**source).save_pretrained(target)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
