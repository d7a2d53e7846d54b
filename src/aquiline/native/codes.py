"""Quantises weights to integers with a scale for each group of inputs, and lays them out for the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

WeightFormat = Literal["int8", "int4"]

GROUPS: dict[WeightFormat, int] = {"int8": 64, "int4": 32}
"""Inputs that share a scale where weights are quantised here."""


@dataclass(frozen=True, eq=False)
class Codes:
    """A matrix as integers: weight = scale · code, and with int4 + minimum.

    Attributes:
        values: (outputs, inputs) int8 in -127 … 127, or uint8 in 0 … 15 where there are minima.
        scales: (outputs, inputs / group rounded up) float16.
        minima: as `scales`, or None.
        group: inputs of a scale: 32, 64, 128, 192 or 256.

    Raises:
        ValueError: for sizes and dtypes that do not fit.
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None
    group: int

    def __post_init__(self) -> None:
        if self.group not in (32, 64, 128, 192, 256):
            raise ValueError(f"the group is {self.group}; allowed: 32, 64, 128, 192 or 256 inputs")
        shape = (self.values.shape[0], -(-self.values.shape[1] // self.group))
        whole = torch.int8 if self.minima is None else torch.uint8
        for name, tensor, size, dtype in (
            ("values", self.values, self.values.shape, whole),
            ("scales", self.scales, shape, torch.float16),
            ("minima", self.minima, shape, torch.float16),
        ):
            if tensor is not None and (tensor.shape != size or tensor.dtype != dtype):
                raise ValueError(
                    f"the {name} are {tuple(tensor.shape)}, {tensor.dtype}; allowed: {tuple(size)}, {dtype}"
                )

    def dequantise(self) -> Tensor:
        """Computes the (outputs, inputs) float32 weights."""
        inputs = self.values.shape[1]
        weight = self.values.float() * self.scales.float().repeat_interleave(self.group, 1)[:, :inputs]
        if self.minima is not None:
            weight += self.minima.float().repeat_interleave(self.group, 1)[:, :inputs]
        return weight


def quantise(weight: Tensor, form: WeightFormat) -> Codes:
    """Rounds a matrix (outputs, inputs) to integers, each group by its own largest value or range.

    Scales are rounded to float16 before the codes are chosen, so that the codes compensate.
    """
    group = GROUPS[form]
    outputs, inputs = weight.shape
    groups = nn.functional.pad(weight.float(), (0, -inputs % group)).view(outputs, -1, group)
    if form == "int8":
        scales = (groups.abs().amax(-1) / 127).half()
        values = _divided(groups, scales).round_().clamp_(-127, 127).to(torch.int8)
        return Codes(values.view(outputs, -1)[:, :inputs], scales, None, group)
    minima = groups.amin(-1).half()
    scales = ((groups.amax(-1) - minima.float()) / 15).half()
    values = _divided(groups - minima.float()[..., None], scales).round_().clamp_(0, 15).to(torch.uint8)
    return Codes(values.view(outputs, -1)[:, :inputs], scales, minima, group)


def _divided(groups: Tensor, scales: Tensor) -> Tensor:
    divisors = scales.float()[..., None]
    return groups / torch.where(divisors == 0, torch.ones_like(divisors), divisors)


def laid_out(codes: Codes, lanes: int, width: int) -> tuple[Tensor, Tensor]:
    """Puts codes and scales into the order of ``matrix.h`` and ``coded.h``.

    Args:
        width: inputs after padding, a multiple of 8.

    Returns:
        uint8 weights (vectors, width / k, lanes, 4), k = 4 or 8 inputs a lane, and float16 scales
        (vectors, groups, 1 or 2, lanes).
    """
    outputs, inputs = codes.values.shape
    vectors = -(-outputs // lanes)
    values = nn.functional.pad(codes.values, (0, width - inputs, 0, vectors * lanes - outputs)).view(torch.uint8)
    if codes.minima is not None:
        # Inputs 0 1, 4 5, 2 3, 6 7 share a byte each, the first in its lower half.
        pairs = values.view(vectors * lanes, width // 8, 4, 2)[:, :, [0, 2, 1, 3]]
        values = pairs[..., 0] | pairs[..., 1] << 4
    words = values.reshape(vectors, lanes, -1, 4).transpose(1, 2)
    parts = [codes.scales] if codes.minima is None else [codes.scales, codes.minima]
    groups = -(-width // codes.group)
    padded = [nn.functional.pad(p, (0, groups - p.shape[1], 0, vectors * lanes - outputs)) for p in parts]
    return words, torch.stack([p.view(vectors, lanes, groups).transpose(1, 2) for p in padded], 2)


def picked(tensor: Tensor, order: Tensor | None, dim: int) -> Tensor:
    """Takes rows or columns in an order in which -1 stands for zeros; None is the given order."""
    if order is None:
        return tensor
    zeros = tensor.new_zeros([1 if i == dim else size for i, size in enumerate(tensor.shape)])
    return torch.cat((tensor, zeros), dim).index_select(dim, order % (tensor.shape[dim] + 1))
