"""From files to a decoder: which model it is, and files that are none."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from compute.errors import ModelNotFound, ModelUnsupported
from compute.kernels.reference import ReferenceKernels
from compute.loading import load_model, read_config
from compute.weights import fingerprint


def test_a_directory_gives_a_decoder_and_its_fingerprint(checkpoint):
    seen = []
    loaded = load_model(
        checkpoint.directory,
        checkpoint.directory,
        "bfloat16",
        ReferenceKernels(),
        lambda done, total: seen.append((done, total)),
    )
    assert loaded.decoder.config == checkpoint.config
    assert loaded.decoder.dtype == torch.bfloat16
    assert loaded.fingerprint == fingerprint(checkpoint.config, [checkpoint.file])
    assert seen[-1] == (len(checkpoint.tensors), len(checkpoint.tensors))


def test_fingerprints_differ_by_configuration_and_by_every_weight_byte(checkpoint):
    path, config = checkpoint.file, checkpoint.config
    first = fingerprint(config, [path])
    assert len(first) == 32
    assert fingerprint(config, [path]) == first
    other = dataclasses.replace(config, norm_eps=1e-5)
    assert fingerprint(other, [path]) != first
    assert fingerprint(config, [path], "int8") != first
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert fingerprint(config, [path]) != first


def test_a_fingerprint_does_not_depend_on_where_the_files_are(checkpoint, tmp_path):
    path, config = checkpoint.file, checkpoint.config
    first = fingerprint(config, [path])
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    path.rename(moved / path.name)
    assert fingerprint(config, [moved / path.name]) == first


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, ModelNotFound),
        ("{", ModelNotFound),
        ("[" * 100_000, ModelNotFound),
        ("[1]", ModelUnsupported),
    ],
)
def test_a_configuration_that_is_none_is_refused_with_its_path(tmp_path, text, error):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=r"config\.json"):
        read_config(tmp_path)
