"""Each product against float64, and its independence of how many rows there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aquiline.native.library import Library
from aquiline.native.packing import Memory
from aquiline.native.stack import readout
from tests.targets.native_targets import threads

SIZES = [(32, 64), (576, 192), (20, 7), (97, 131), (256, 33), (1536, 80), (1, 1)]
"""(inputs, outputs), whole tiles and every kind of remainder."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_product_is_close_to_float64_and_independent_of_other_rows(
    library: Library, dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    x = torch.randn(70, inputs, generator=generator).to(dtype)
    product = readout(Memory(library), weight, dtype, inputs=inputs, bias=bias, wide=True)
    expected = x.double() @ weight.double().T + bias.double()
    scale = x.double().abs() @ weight.double().abs().T + 1
    together = product(x)
    assert ((together - expected).abs() / scale).max() < 1e-6
    for count in (*range(1, 14), 16, 17, 25, 32, 33, 48, 64):
        assert torch.equal(product(x[:count]), together[:count]), count
    with threads(2):
        assert torch.equal(product(x), together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 3])
def test_norms_of_parts(library: Library, dtype: torch.dtype, parts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    width = 51 * parts
    norm = torch.rand(width, generator=generator) + 0.5
    x = torch.randn(2, 9, width, generator=generator).to(dtype)
    only_norm = readout(Memory(library), None, dtype, inputs=width, norm=norm, parts=parts, eps=1e-5)
    pieces = x.double().view(2, 9, parts, 51)
    expected = pieces * (pieces.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected = expected.flatten(2) * norm.double()
    torch.testing.assert_close(
        only_norm(x), expected.to(dtype), atol=1e-6, rtol=2**-8 if dtype != x.float().dtype else 1e-6
    )


@pytest.mark.parametrize("count", [0, 300, 600])
def test_any_number_of_rows(library: Library, count: int) -> None:
    weight = torch.randn(40, 24)
    product = readout(Memory(library), weight, torch.float32, inputs=24, wide=True)
    x = torch.randn(count, 24)
    torch.testing.assert_close(product(x), x @ weight.T, atol=1e-4, rtol=1e-4)


def test_wrong_rows_are_refused(library: Library) -> None:
    product = readout(Memory(library), torch.randn(8, 24), torch.float32, inputs=24, wide=True)
    with pytest.raises(ValueError, match=r"\(3, 25\).*allowed: \(3, 24\)"):
        product(torch.randn(3, 25))
    with pytest.raises(ValueError, match=r"float64.*float32.*convert"):
        product(torch.randn(3, 24, dtype=torch.float64))
    wide = torch.randn(24, 3)
    assert torch.equal(product(wide.T), product(wide.T.contiguous()))
    assert product(torch.full((2, 24), float("nan"))).isnan().all()


ODD = {
    "none": [],
    "first and last": [(0, 0, 1e-30), (79, 1535, 3e38), (15, 8, -1e-38), (16, 7, float("inf")), (79, 1528, -0.0)],
    "neighbours": [(3, i, 2.0 ** (-i)) for i in range(120)],
    "a row of zeros": [(5, i, 0.0) for i in range(1536)],
}
"""Weights (output, input, value) among normal ones, whose upper bytes tables lack."""


@pytest.mark.parametrize("case", ODD)
def test_squeezed_weights_give_the_bits_of_whole_ones(library: Library, case: str) -> None:
    if not library.squeezes:
        pytest.skip("this processor's weights are not squeezed")
    weight = torch.randn(80, 1536, generator=torch.Generator().manual_seed(1)).bfloat16()
    for output, place, value in ODD[case]:
        weight[output, place] = value
    squeezed, whole = (
        readout(Memory(one), weight, torch.bfloat16, inputs=1536, wide=True)
        for one in (library, replace(library, squeezes=False))
    )
    assert squeezed.struct.matrix.tables and not whole.struct.matrix.tables
    x = torch.randn(70, 1536, generator=torch.Generator().manual_seed(2)).bfloat16()
    for count in (1, 2, 5, 6, 7, 12, 13, 24, 25, 70):
        found, expected = squeezed(x[:count]), whole(x[:count])
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), count


def test_weights_of_all_magnitudes_are_not_squeezed(library: Library) -> None:
    bits = torch.randint(-(2**15), 2**15, (32, 128), generator=torch.Generator().manual_seed(3), dtype=torch.int16)
    weight = bits.view(torch.bfloat16).nan_to_num(0, 0, 0)
    product = readout(Memory(library), weight, torch.bfloat16, inputs=128, wide=True)
    assert not product.struct.matrix.tables
    assert product(torch.eye(128).bfloat16()).bfloat16().equal(weight.T)
