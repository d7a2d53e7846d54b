"""Computes rotary position embeddings with default, linear, llama3 and yarn scaling.

Frequencies depend only on the configuration, never on the length of the current input, so that a
token's keys do not depend on the rest of the cache. Dynamic NTK, which violates this, is limited to
its original length, where it is the identity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_KNOWN = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary settings of one model.

    Attributes:
        theta: base of the frequencies.
        dim: rotated width, the head dimension.
        kind: one of default, linear, dynamic, llama3, yarn.
        scaling: the remaining parameters of the configuration, as read.
        original_max_positions: context length in training, before scaling.
    """

    theta: float
    dim: int
    kind: str = "default"
    scaling: Mapping[str, Any] | None = None
    original_max_positions: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _KNOWN:
            raise ValueError(f"rope scaling {self.kind!r} is not supported; allowed: {', '.join(_KNOWN)}")


def rope_from_hf(config: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """Reads the rotary settings of a Hugging Face configuration, old or new style.

    Args:
        config: config.json as a mapping. As in transformers, `rope_scaling` replaces `rope_parameters`, and
            a value in it takes precedence over the same key at the top level.

    Raises:
        ValueError: for a scaling whose frequencies depend on the input's length, or that differs by layer or
            rotates a part of each head.
    """
    parameters = _parameters(config)
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ValueError("rope parameters differ by the kind of layer; use the HF adapter")
    kind = _kind(parameters)
    if kind == "longrope":
        raise ValueError("rope scaling 'longrope' changes frequencies with the input's length; use the HF adapter")
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1 and kind != "default":  # Without scaling, these families rotate whole heads in any case.
        raise ValueError(f"partial_rotary_factor {partial!r} with rope scaling {kind!r} is not supported")
    original = _original(config, parameters)
    if kind == "yarn" and parameters.get("factor") is None:  # extended to max_position_embeddings
        parameters["factor"] = int(config.get("max_position_embeddings") or original) / max(original, 1)
    return RopeConfig(float(theta), head_dim, kind, parameters, original)


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(config.get("rope_scaling") or config.get("rope_parameters") or {})


def _kind(parameters: Mapping[str, Any]) -> str:
    return str(parameters.get("rope_type", parameters.get("type", "default")))


def _original(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> int:
    """Returns the context length in training; the top level takes precedence over the rope parameters."""
    names = ("original_max_position_embeddings", "max_position_embeddings")
    return int(config.get(names[0]) or parameters.get(names[0]) or config.get(names[1]) or 0)


def inverse_frequencies(rope: RopeConfig) -> tuple[Tensor, float]:
    """Returns ((dim / 2,) float32 inverse frequencies, factor on cos and sin)."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    plain = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling or {}
    if rope.kind == "linear":
        return plain / float(scaling["factor"]), 1.0
    if rope.kind == "llama3":
        return _llama3(plain, scaling, rope.original_max_positions), 1.0
    if rope.kind == "yarn":
        return _yarn(plain, rope, scaling)
    return plain, 1.0


def _llama3(plain: Tensor, scaling: Mapping[str, Any], original: int) -> Tensor:
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    result = torch.where(wavelength > original / low, plain / factor, plain)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, blended, result)


def _yarn(plain: Tensor, rope: RopeConfig, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    factor = float(scaling["factor"])

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        weight, weight_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if weight and weight_all:
            attention = magnitude(factor, weight) / magnitude(factor, weight_all)
        else:
            attention = magnitude(factor)

    def boundary(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low = boundary(float(scaling.get("beta_fast") or 32))
    high = boundary(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2).float() - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return plain / factor * (1 - keep) + plain * keep, float(attention)


def max_positions(config: Mapping[str, Any]) -> int:
    """Returns the usable context length of a Hugging Face configuration with `max_position_embeddings`.

    Linear and YaRN scaling extend the length in training by their factor, whether or not
    `max_position_embeddings` was raised with it; their recipes leave it alone. Dynamic NTK and longrope
    recompute all frequencies beyond the original length, which would invalidate cached keys: it is the limit.
    Where the scaling differs by the kind of layer, the shortest length counts.
    """
    declared, parameters = int(config["max_position_embeddings"]), _parameters(config)
    parts = [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]
    return min(_extended(config, part, declared) for part in parts)


def rope_changes(config: Mapping[str, Any]) -> bool:
    """Returns True if the frequencies change beyond the original length."""
    parameters = _parameters(config)
    parts = [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]
    return any(_kind(part) in ("dynamic", "longrope") for part in parts)


def _extended(config: Mapping[str, Any], parameters: Mapping[str, Any], declared: int) -> int:
    kind, original = _kind(parameters), _original(config, parameters)
    if kind in ("dynamic", "longrope"):
        return min(declared, original)
    if kind in ("linear", "yarn"):
        return max(declared, int(original * float(parameters.get("factor") or 1)))
    return declared


class RotaryTable:
    """Cosines and sines by position, extended on demand.

    On a CPU, a table look-up costs less than the formula's five small operations per step.
    """

    def __init__(self, rope: RopeConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._frequencies, self._factor = inverse_frequencies(rope)
        self.dtype, self.device = dtype, torch.device(device)
        self._cos = self._sin = torch.empty(0, rope.dim, dtype=dtype, device=device)

    def _grow(self, size: int) -> None:
        angles = torch.arange(size).float()[:, None] * self._frequencies[None, :]
        angles = torch.cat((angles, angles), dim=-1)
        self._cos = (angles.cos() * self._factor).to(self.dtype).to(self.device)
        self._sin = (angles.sin() * self._factor).to(self.dtype).to(self.device)

    def at(self, positions: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, each (*positions.shape, dim).

        Args:
            positions: int64 positions.
            limit: exclusive upper bound on `positions`, which the caller knows without a device sync.
        """
        cos, sin = self.upto(limit)
        return cos[positions], sin[positions]

    def upto(self, limit: int) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of at least all positions below `limit`, each (positions, dim)."""
        if limit > self._cos.shape[0]:
            self._grow(max(1024, 1 << (limit - 1).bit_length()))
        return self._cos, self._sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotation to the first `dim` channels of x (…, head_dim); cos, sin (…, dim)."""
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :dim], cos, sin), x[..., dim:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
