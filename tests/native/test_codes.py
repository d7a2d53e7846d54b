"""Products with integer weights: against float64, and the same bits for any rows, threads and ways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from aquiline.native.codes import Codes, WeightFormat, quantise
from aquiline.native.library import Library
from aquiline.native.packing import Memory
from aquiline.native.stack import readout
from tests.targets.native_targets import threads

SIZES = [(64, 64), (576, 192), (20, 7), (97, 131), (320, 33), (1536, 80), (1, 1)]
"""(inputs, outputs), whole groups and every kind of remainder."""


def random_codes(outputs: int, inputs: int, group: int, bits: int) -> Codes:
    generator = torch.Generator().manual_seed(inputs + group)
    low, high, dtype = (-127, 128, torch.int8) if bits == 8 else (0, 16, torch.uint8)
    values = torch.randint(low, high, (outputs, inputs), generator=generator).to(dtype)
    groups = -(-inputs // group)
    scales = (torch.rand(outputs, groups, generator=generator) * 0.01).half()
    minima = None if bits == 8 else torch.randn(outputs, groups, generator=generator).half() * 0.05
    return Codes(values, scales, minima, group)


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (8, 64), (8, 128), (8, 192), (8, 256), (4, 32), (4, 64)])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_product_is_close_to_float64_and_independent_of_other_rows(
    library: Library, bits: int, group: int, inputs: int, outputs: int
) -> None:
    codes = random_codes(outputs, inputs, group, bits)
    weight = codes.dequantise()
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(outputs, generator=generator)
    x = torch.randn(70, inputs, generator=generator)
    product = readout(Memory(library), codes, torch.float32, inputs=inputs, bias=bias, wide=True)
    together = product(x)
    # Rows are exact in sixteen bits here: what is left is float32's own rounding.
    step = x.abs().amax(1, keepdim=True).double() / (127 * 256)
    rounded = (x.double() / step).round() * step
    expected = rounded @ weight.double().T + bias.double()
    size = rounded.abs() @ weight.double().abs().T + 1
    assert ((together - expected).abs() / size).max() < 2e-5
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 17, 32, 33, 48, 64):
        assert torch.equal(product(x[:count]), together[:count]), count
    with threads(2):
        assert torch.equal(product(x), together)


@pytest.mark.parametrize(("form", "bound"), [("int8", 0.005), ("int4", 0.05)])
def test_quantising_rounds_to_the_nearest_of_each_group(form: WeightFormat, bound: float) -> None:
    weight = torch.randn(50, 200, generator=torch.Generator().manual_seed(0))
    weight[3, 64:128] = 0
    weight[4] = 1.5
    codes = quantise(weight, form)
    error = (codes.dequantise() - weight).abs()
    steps = codes.scales.float().repeat_interleave(codes.group, 1)[:, :200]
    assert (error <= 0.51 * steps + 1e-3 * weight.abs()).all()
    assert (error.square().mean() / weight.square().mean()).sqrt() < 2 * bound


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_values_that_are_not_finite_stay_so(library: Library, form: WeightFormat) -> None:
    product = readout(Memory(library, form), torch.randn(8, 96), torch.float32, inputs=96, wide=True)
    x = torch.randn(9, 96)
    x[2, 5], x[7, 90] = float("nan"), float("inf")
    assert product(x).isfinite().all(1).tolist() == [i not in (2, 7) for i in range(9)]
    assert not product(torch.zeros(3, 96)).any() or form == "int4"
    assert product(torch.zeros(3, 96)).isfinite().all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group": 96}, "group is 96; allowed: 32, 64"),
        ({"group": 64}, r"scales are \(6, 4\).*allowed: \(6, 2\)"),
        ({"scales": torch.ones(6, 4)}, "scales.*float32.*float16"),
        ({"minima": torch.ones(6, 4).half()}, "values.*int8.*uint8"),
    ],
)
def test_codes_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(random_codes(6, 128, 32, 8), **change)
