"""A tiny byte-level tokenizer: token id = byte, then a few special tokens."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gateway.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS_ID = 256


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory):
    """A directory with the files of a model whose tokens are single bytes."""
    directory = tmp_path_factory.mktemp("byte_model")
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable}
    names |= {byte: chr(0x100 + index) for index, byte in enumerate(others)}
    vocab = {names[byte]: byte for byte in range(256)}
    splitter = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    splitter.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    splitter.decoder = decoders.ByteLevel()
    splitter.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    splitter.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    return directory


@pytest.fixture(scope="session")
def byte_tokenizer(byte_model):
    return Tokenizer.load(byte_model)


@pytest.fixture(scope="session")
def real_tokenizer(model_files):
    return Tokenizer.load(model_files.directory)
