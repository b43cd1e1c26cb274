"""Rotary position embeddings with the scalings that transformers knows.

Every scaling is a way to choose the D/2 inverse frequencies and a factor on cos and sin.
Two of them depend on how long the sequence is, while keys in the pool are rotated once
and shared between sequences of different lengths. They are therefore limited to the
lengths at which they do not vary:

- dynamic: equal to the default up to max_position_embeddings; that is the limit.
- longrope: the short factors hold up to original_max_position_embeddings; that is the
  limit. Beyond it all positions, old ones too, would have to use the long factors.

Sources: Su et al. 2021, arXiv:2104.09864 (RoPE); Chen et al. 2023, arXiv:2306.15595
(linear); Peng et al. 2023, arXiv:2309.00071 (dynamic NTK, YaRN); Ding et al. 2024,
arXiv:2402.13753 (LongRoPE); Llama 3.1's model card (llama3). All of it in fp32 and in
the order of operations of transformers, so that positions agree to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from compute.errors import ModelUnsupported

_DEFAULT_THETA = 10000.0
_FIRST_POSITIONS = 8192
_HAS_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions are encoded. `parameters` are those of `kind`, in transformers' words.

    `head_size` is of the leading part of a head that turns.
    """

    kind: str
    theta: float
    head_size: int
    max_positions: int
    parameters: Mapping[str, Any]

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], head_size: int, max_positions: int, *, partial: bool = False
    ) -> RopeConfig:
        """Read rope_parameters (transformers 5) or rope_theta and rope_scaling (before).

        `partial`: of a family that may turn a part of each head only.

        Raises:
            ModelUnsupported: an unknown kind, or a parameter is missing or of no use.
        """
        given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        if not isinstance(given, Mapping):
            raise ModelUnsupported(f"RoPE parameters {given!r}: not an object")
        given = dict(given)
        kind = given.pop("rope_type", None) or given.get("type") or "default"
        given.pop("type", None)
        theta = given.pop("rope_theta", None) or raw.get("rope_theta") or _DEFAULT_THETA
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < 1e38:
            raise ModelUnsupported(f"rope_theta {theta!r} is not a positive number")
        if not isinstance(kind, str) or kind not in _FREQUENCIES:
            raise ModelUnsupported(f"rope_type {kind!r}: we run {', '.join(sorted(_FREQUENCIES))}")
        if raw.get("partial_rotary_factor") is not None:
            given.setdefault("partial_rotary_factor", raw["partial_rotary_factor"])
        if kind in _HAS_ORIGINAL_LENGTH:
            outer = raw.get("original_max_position_embeddings")
            length = outer or given.get("original_max_position_embeddings") or max_positions
            given["original_max_position_embeddings"] = length
        if partial:
            head_size = _rotated(given.pop("partial_rotary_factor", 1.0), head_size)
        config = cls(kind, float(theta), head_size, max_positions, given)
        config._check()
        return config

    @property
    def max_exact_length(self) -> int:
        """The longest sequence for which one set of frequencies is right."""
        if self.kind == "longrope":
            original: int = self.parameters["original_max_position_embeddings"]
            return min(self.max_positions, original)
        return self.max_positions

    def _check(self) -> None:
        partial = self.parameters.get("partial_rotary_factor", 1.0)
        if partial != 1.0 and self.kind != "proportional":
            raise ModelUnsupported(
                f"partial_rotary_factor {partial} with rope_type {self.kind!r}: "
                "this family rotates whole heads"
            )
        try:
            frequencies, scaling = inverse_frequencies(self)
        except KeyError as error:
            name = error.args[0]
            raise ModelUnsupported(f"rope_type {self.kind!r} needs {name!r}") from None
        except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
            raise ModelUnsupported(f"rope_type {self.kind!r}: {error}") from None
        if not (torch.isfinite(frequencies).all() and math.isfinite(scaling)):
            raise ModelUnsupported(f"rope_type {self.kind!r}: its parameters give no frequencies")


class RopeTables:
    """cos and sin by position, computed as far as sequences have come: models that take
    millions of positions would fill gigabytes before the first one.

    Kernels turn row i of a head with row i + D/2. Where only a part of a head turns, its
    halves therefore lie at the start of the head's halves (see `rotary_order`), and the
    rest has cos 1 and sin 0.
    """

    def __init__(self, rope: RopeConfig, head_size: int, device: str = "cpu") -> None:
        self._rope = rope
        self._head_size = head_size
        self._device = device
        self._tables = self._filled(min(_FIRST_POSITIONS, rope.max_exact_length))

    def rows(
        self, positions: torch.Tensor, num_positions: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, D] in fp32 of positions [T], all below `num_positions`.

        Raises ValueError if a position is beyond the exact length.
        """
        num_needed = int(positions.max()) + 1 if num_positions is None else num_positions
        num_known = self._tables[0].shape[0]
        if num_needed > num_known:
            doubled = min(2 * num_known, self._rope.max_exact_length)
            self._tables = self._filled(max(num_needed, doubled))
        cos, sin = self._tables
        return cos[positions], sin[positions]

    def _filled(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rope_tables(self._rope, num_positions)
        return self._widened(cos, 1.0), self._widened(sin, 0.0)

    def _widened(self, table: torch.Tensor, rest: float) -> torch.Tensor:
        num_rotated = table.shape[1]
        if num_rotated < self._head_size:
            still = torch.full((table.shape[0], (self._head_size - num_rotated) // 2), rest)
            first, second = table.chunk(2, dim=1)
            table = torch.cat((first, still, second, still), dim=1)
        return table.to(self._device)


def rotary_order(num_rotated: int, head_size: int) -> torch.Tensor:
    """[D]: which element of a head is at each place in our order, so that those that turn
    with each other are D/2 apart."""
    half = num_rotated // 2
    still = (head_size - num_rotated) // 2
    first, second = torch.arange(half), torch.arange(half, num_rotated)
    rest = torch.arange(num_rotated, head_size)
    return torch.cat((first, rest[:still], second, rest[still:]))


def rope_tables(rope: RopeConfig, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [num_positions, D] in fp32, both halves filled.

    Raises ValueError if num_positions exceeds the exact length.
    """
    if num_positions > rope.max_exact_length:
        raise ValueError(
            f"{num_positions} positions: rope_type {rope.kind!r} is exact up to "
            f"{rope.max_exact_length}"
        )
    frequencies, scaling = inverse_frequencies(rope)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=1)
    return angles.cos() * scaling, angles.sin() * scaling


def inverse_frequencies(rope: RopeConfig, seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [D/2] in fp32, and the factor on cos and sin.

    `seq_len` matters to the kinds that depend on the length; without it, they are those
    of a sequence within the exact length.
    """
    return _FREQUENCIES[rope.kind](rope, seq_len or 0)


def _rotated(share: Any, head_size: int) -> int:
    """Elements of a head that turn."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ModelUnsupported(f"partial_rotary_factor {share!r} is not in (0, 1]")
    num_rotated = int(head_size * share)
    if num_rotated < 2 or num_rotated % 2:
        raise ModelUnsupported(
            f"partial_rotary_factor {share}: {num_rotated} of {head_size} elements would turn"
        )
    return num_rotated


def _powers(base: float, size: int, head_size: int) -> torch.Tensor:
    """base ** (0/D, 2/D, ..., (size-2)/D) in fp32."""
    return base ** (torch.arange(0, size, 2, dtype=torch.float32) / head_size)


def _default(rope: RopeConfig, _seq_len: int) -> tuple[torch.Tensor, float]:
    return 1.0 / _powers(rope.theta, rope.head_size, rope.head_size), 1.0


def _linear(rope: RopeConfig, _seq_len: int) -> tuple[torch.Tensor, float]:
    frequencies = 1.0 / _powers(rope.theta, rope.head_size, rope.head_size)
    return frequencies / rope.parameters["factor"], 1.0


def _proportional(rope: RopeConfig, _seq_len: int) -> tuple[torch.Tensor, float]:
    """Rotate the leading pairs only; the others keep frequency 0, which is no rotation."""
    share = rope.parameters.get("partial_rotary_factor", 1.0)
    num_rotated = int(share * rope.head_size // 2)
    frequencies = torch.zeros(rope.head_size // 2)
    frequencies[:num_rotated] = 1.0 / _powers(rope.theta, 2 * num_rotated, rope.head_size)
    return frequencies / rope.parameters.get("factor", 1.0), 1.0


def _dynamic(rope: RopeConfig, seq_len: int) -> tuple[torch.Tensor, float]:
    factor = rope.parameters["factor"]
    seq_len = max(seq_len, rope.max_positions)
    stretch = (factor * seq_len / rope.max_positions) - (factor - 1)
    base = rope.theta * stretch ** (rope.head_size / (rope.head_size - 2))
    return 1.0 / _powers(base, rope.head_size, rope.head_size), 1.0


def _yarn(rope: RopeConfig, _seq_len: int) -> tuple[torch.Tensor, float]:
    """Interpolate slow pairs, keep fast ones, blend linearly in between."""
    given = rope.parameters
    original = given["original_max_position_embeddings"]
    factor = given["factor"] or rope.max_positions / original
    powers = _powers(rope.theta, rope.head_size, rope.head_size)
    low, high = _yarn_range(rope, original)
    ramp = (torch.arange(rope.head_size // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    frequencies = (1.0 / (factor * powers)) * (1 - keep) + (1.0 / powers) * keep
    return frequencies, _yarn_scaling(given, factor)


def _yarn_range(rope: RopeConfig, original_length: int) -> tuple[float, float]:
    """Pairs between which YaRN blends: those that turn beta_fast and beta_slow times."""

    def pair_turning(num_turns: float) -> float:
        span = original_length / (num_turns * 2 * math.pi)
        return (rope.head_size * math.log(span)) / (2 * math.log(rope.theta))

    low = pair_turning(rope.parameters.get("beta_fast") or 32)
    high = pair_turning(rope.parameters.get("beta_slow") or 1)
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_size - 1)
    return low, high if high != low else high + 0.001  # the ramp divides by their distance


def _yarn_scaling(given: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return mscale(given["mscale"]) / mscale(given["mscale_all_dim"])
    return mscale(1.0)


def _longrope(rope: RopeConfig, seq_len: int) -> tuple[torch.Tensor, float]:
    given = rope.parameters
    original = given["original_max_position_embeddings"]
    divisors = given["long_factor"] if seq_len > original else given["short_factor"]
    for name in ("long_factor", "short_factor"):
        if len(given[name]) != rope.head_size // 2:
            raise ValueError(f"{name} has {len(given[name])} entries, not {rope.head_size // 2}")
    powers = _powers(rope.theta, rope.head_size, rope.head_size)
    frequencies = 1.0 / (torch.tensor(divisors, dtype=torch.float32) * powers)
    scaling = given.get("attention_factor")
    if scaling is None:
        factor = given.get("factor") or rope.max_positions / original
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return frequencies, float(scaling)


def _llama3(rope: RopeConfig, _seq_len: int) -> tuple[torch.Tensor, float]:
    """Divide long wavelengths by the factor, keep short ones, blend in between."""
    given = rope.parameters
    factor, low, high = given["factor"], given["low_freq_factor"], given["high_freq_factor"]
    original = given["original_max_position_embeddings"]
    frequencies = 1.0 / _powers(rope.theta, rope.head_size, rope.head_size)
    wavelengths = 2 * math.pi / frequencies
    is_long, is_short = wavelengths > original / low, wavelengths < original / high
    keep = (original / wavelengths - low) / (high - low)
    blended = (1 - keep) * frequencies / factor + keep * frequencies
    frequencies = torch.where(is_long, frequencies / factor, frequencies)
    return torch.where(is_long | is_short, frequencies, blended), 1.0


_FREQUENCIES: dict[str, Callable[[RopeConfig, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
