"""GGUF: read as the checkpoint it was made from, or refused with tensor or file named."""

from __future__ import annotations

import dataclasses
import random
import struct

import gguf
import numpy as np
import pytest
import torch

from compute.errors import ModelNotFound, ModelUnsupported, WeightsInvalid
from compute.rope import inverse_frequencies
from compute.weights import open_source
from compute.weights.gguf_file import GgufFile

GGUF_NAMES = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
HEADS = {"q": 4, "k": 2}


def _gguf_name(name):
    base = name.removesuffix(".bias")
    kind = "bias" if name.endswith(".bias") else "weight"
    if base.startswith("layers."):
        _, layer, part = base.split(".")
        return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}", part
    return f"{GGUF_NAMES[base]}.{kind}", base


def _interleaved(rows, num_heads):
    """The order of llama.cpp: row i + D/2 of a head directly follows row i."""
    per_head = rows.reshape(num_heads, -1, *rows.shape[1:])
    half = per_head.shape[1] // 2
    out = np.empty_like(per_head)
    out[:, 0::2], out[:, 1::2] = per_head[:, :half], per_head[:, half:]
    return out.reshape(rows.shape)


def _write_gguf(path, tensors, kind, architecture="llama", rope_scaling=None, divisors=None):
    """Our tensors as a GGUF file; vectors stay fp32, as llama.cpp leaves them."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_token_list([f"token {n}" for n in range(50)])  # arrays are stepped over
    writer.add_token_types([1] * 50)
    if rope_scaling is not None:
        writer.add_rope_scaling_type(rope_scaling)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.numpy().astype(np.float32))
    for name, tensor in tensors.items():
        stored_name, part = _gguf_name(name)
        values = tensor.numpy().astype(np.float32)
        if part in HEADS:
            values = _interleaved(values, HEADS[part])
        if values.ndim == 1:
            writer.add_tensor(stored_name, values)
        elif kind == gguf.GGMLQuantizationType.F16:
            writer.add_tensor(stored_name, values.astype(np.float16))
        else:
            writer.add_tensor(stored_name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def gguf_file(tmp_path, checkpoint):
    kind = gguf.GGMLQuantizationType.F32
    return _write_gguf(tmp_path / "tiny.gguf", checkpoint.tensors, kind)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
def test_gguf_in_fp32_gives_the_tensors_of_the_checkpoint(tmp_path, make_checkpoint, changes):
    checkpoint = make_checkpoint(**changes)
    expected = checkpoint.tensors
    path = _write_gguf(tmp_path / "tiny.gguf", expected, gguf.GGMLQuantizationType.F32)
    got = checkpoint.taken(path)
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize(
    ("kind", "error"),
    # Half a step of the type, as a share of the largest value, and its scale's rounding.
    [
        ("F16", 2**-11),
        ("BF16", 2**-8),
        ("Q8_0", 1 / 220),
        ("Q5_0", 1 / 15),
        ("Q4_0", 1 / 7),  # its 16 steps are not even around 0
        ("Q4_1", 1 / 14),
    ],
)
def test_quantized_gguf_gives_the_tensors_to_the_types_precision(tmp_path, checkpoint, kind, error):
    expected = checkpoint.tensors
    path = tmp_path / "tiny.gguf"
    got = checkpoint.taken(_write_gguf(path, expected, gguf.GGMLQuantizationType[kind]))
    assert not torch.equal(got["embedding"], expected["embedding"])
    for name, tensor in expected.items():
        assert (got[name] - tensor).abs().max() <= error * tensor.abs().max(), name


@pytest.mark.parametrize("keep", [0, 3, 20, 200, 0.5, 0.999])
def test_a_truncated_gguf_file_is_named(gguf_file, checkpoint, keep):
    whole = gguf_file.read_bytes()
    gguf_file.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(WeightsInvalid, match=r"tiny\.gguf: truncated or corrupt"):
        open_source(gguf_file, checkpoint.config)


def test_no_prefix_of_a_gguf_file_is_a_model(gguf_file, checkpoint):
    whole = gguf_file.read_bytes()
    header_end = len(whole) - sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    points = [*range(0, header_end, 5), *random.Random(0).sample(range(len(whole)), 100)]
    for keep in points:
        gguf_file.write_bytes(whole[:keep])
        with pytest.raises(WeightsInvalid, match=r"tiny\.gguf"):
            open_source(gguf_file, checkpoint.config)


def test_a_gguf_file_with_garbage_in_its_header_is_refused_or_read_right(gguf_file, checkpoint):
    expected = checkpoint.taken(gguf_file)
    whole = gguf_file.read_bytes()
    num_refused = 0
    for at in range(8, 2400, 13):
        gguf_file.write_bytes(whole[:at] + b"\xff" * 8 + whole[at + 8 :])
        try:
            got = checkpoint.taken(gguf_file)
        except (WeightsInvalid, ModelUnsupported):
            num_refused += 1
        else:  # it hit what the weights do not need: a token, the context length
            assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert num_refused > 20


@pytest.mark.parametrize(
    ("patch", "error", "named"),
    [
        ((0, b"GGML"), WeightsInvalid, "does not start with GGUF"),
        ((4, struct.pack("<I", 1)), ModelUnsupported, "version 1"),
        ((8, struct.pack("<Q", 2**40)), WeightsInvalid, "truncated or corrupt"),
    ],
)
def test_a_gguf_header_we_cannot_read_is_refused(gguf_file, checkpoint, patch, error, named):
    at, new = patch
    whole = gguf_file.read_bytes()
    gguf_file.write_bytes(whole[:at] + new + whole[at + len(new) :])
    with pytest.raises(error, match=named):
        open_source(gguf_file, checkpoint.config)


def test_another_gguf_architecture_is_unsupported(tmp_path, checkpoint):
    path = tmp_path / "other.gguf"
    _write_gguf(path, checkpoint.tensors, gguf.GGMLQuantizationType.F32, architecture="qwen2")
    with pytest.raises(ModelUnsupported, match="qwen2"):
        open_source(path, checkpoint.config)


def test_a_gguf_tensor_missing_extra_or_misshaped_is_named(tmp_path, checkpoint):
    path = tmp_path / "tiny.gguf"
    tensors = checkpoint.tensors
    cases = {
        r"missing: blk\.0\.attn_q\.weight": {k: v for k, v in tensors.items() if k != "layers.0.q"},
        r"of no use: blk\.0\.attn_q\.bias": {**tensors, "layers.0.q.bias": torch.zeros(64)},
        r"'blk\.0\.attn_v\.weight' has shape \[16, 64\]": {
            **tensors,
            "layers.0.v": torch.zeros(16, 64),
        },
    }
    for message, changed in cases.items():
        _write_gguf(path, changed, gguf.GGMLQuantizationType.F32)
        with pytest.raises(WeightsInvalid, match=message):
            checkpoint.taken(path)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_divisors_of_frequencies_must_say_what_the_configuration_says(tmp_path, make_checkpoint):
    checkpoint = make_checkpoint(rope_parameters=LLAMA3)
    scaled = checkpoint.config.ropes[0]
    plain, _ = inverse_frequencies(dataclasses.replace(scaled, kind="default"))
    divisors = plain / inverse_frequencies(scaled)[0]
    assert divisors.max() == 8
    path = tmp_path / "tiny.gguf"
    _write_gguf(path, checkpoint.tensors, gguf.GGMLQuantizationType.F32, divisors=divisors)
    assert torch.equal(checkpoint.taken(path)["norm"], checkpoint.tensors["norm"])
    lost = dataclasses.replace(
        checkpoint.config, ropes=(dataclasses.replace(scaled, kind="default"),)
    )
    with pytest.raises(ModelUnsupported, match=r"rope_freqs\.weight contradicts.*'default'"):
        open_source(path, lost)
    _write_gguf(path, checkpoint.tensors, gguf.GGMLQuantizationType.F32, divisors=divisors[:3])
    with pytest.raises(ModelUnsupported, match=r"rope_freqs\.weight contradicts"):
        open_source(path, checkpoint.config)


def test_a_scaling_of_positions_that_the_configuration_lacks_is_unsupported(tmp_path, checkpoint):
    path, kind = tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F32
    _write_gguf(path, checkpoint.tensors, kind, rope_scaling=gguf.RopeScalingType.LINEAR)
    with pytest.raises(ModelUnsupported, match="'linear' is missing in the configuration"):
        open_source(path, checkpoint.config)
    _write_gguf(path, checkpoint.tensors, kind, rope_scaling=gguf.RopeScalingType.NONE)
    assert torch.equal(checkpoint.taken(path)["norm"], checkpoint.tensors["norm"])


def test_no_gguf_file_is_no_model(tmp_path, checkpoint):
    with pytest.raises(ModelNotFound, match=r"none\.gguf"):
        open_source(tmp_path / "none.gguf", checkpoint.config)


# K-quants: nothing writes them here, so blocks of random bytes are read as the format says


def _q4_k(block: bytes) -> list[float]:
    """256 numbers of 144 bytes: two fp16, eight 6-bit scales and minima, 4-bit numbers."""
    scale, least = np.frombuffer(block[:4], np.float16).astype(np.float32).tolist()
    packed, numbers = block[4:16], block[16:]
    values = []
    for part in range(8):
        if part < 4:
            factor, offset = packed[part] & 63, packed[part + 4] & 63
        else:
            factor = (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4
            offset = (packed[part + 4] >> 4) | (packed[part] >> 6) << 4
        for byte in numbers[32 * (part // 2) : 32 * (part // 2) + 32]:
            number = byte >> 4 if part % 2 else byte & 15
            values.append(scale * factor * number - least * offset)
    return values


def _q6_k(block: bytes) -> list[float]:
    """256 numbers of 210 bytes: low four bits, high two bits, sixteen int8 scales, one fp16."""
    low, high = block[:128], block[128:192]
    factors = np.frombuffer(block[192:208], np.int8).tolist()
    scale = float(np.frombuffer(block[208:], np.float16)[0])
    values = []
    for half in range(2):
        for quarter in range(4):
            for i in range(32):
                byte = low[64 * half + 32 * (quarter % 2) + i]
                number = byte >> 4 if quarter >= 2 else byte & 15
                number |= (high[32 * half + i] >> (2 * quarter) & 3) << 4
                factor = factors[8 * half + 2 * quarter + i // 16]
                values.append(scale * factor * (number - 32))
    return values


@pytest.mark.parametrize(("kind", "size", "decode"), [("Q4_K", 144, _q4_k), ("Q6_K", 210, _q6_k)])
def test_k_quants_are_read_as_their_format_says(tmp_path, kind, size, decode):
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 256, (3, 2 * size), dtype=np.uint8)  # 3 rows of 512 numbers
    for row in rows:
        for block in row.reshape(2, size):
            scales = rng.uniform(0.01, 0.1, 2).astype(np.float16).view(np.uint8)
            if kind == "Q4_K":
                block[:4] = scales
            else:
                block[208:] = scales[:2]
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("rows", rows, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GgufFile(tmp_path / "k.gguf").tensors["rows"]
    assert tensor.shape == (3, 512)
    got = tensor.dequantized()
    for row, values in zip(rows, got, strict=True):
        expected = [x for block in row.reshape(2, size) for x in decode(block.tobytes())]
        # fp32: products in another order
        torch.testing.assert_close(values, torch.tensor(expected), rtol=1e-5, atol=1e-5)
