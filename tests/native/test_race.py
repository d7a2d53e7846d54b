"""Races of the kernels give the bits and the tokens of their definition in Python."""

from __future__ import annotations

import math

import pytest
import torch

from aquiline.native.library import Library
from aquiline.native.race import delays, native_draw, race_of
from aquiline.race import draw, noise
from aquiline.sampling import SamplingParams, TokenChooser, distribution

CPU = torch.device("cpu")
SETTINGS = [
    {},
    {"temperature": 0.2, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.5, "top_p": 0.99, "min_p": 0.01},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.01},
    {"temperature": 2.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 10**12, "top_p": 1e-9},
]


@pytest.mark.parametrize("seed", [0, 77, -1, (1 << 64) - 1])
def test_delays_have_the_bits_of_the_noise(library: Library, seed: int) -> None:
    race = race_of(SamplingParams(temperature=0.9), seed, 12, 1.3)
    for count in (1, 15, 16, 17, 100_000):
        expected = noise(seed, 12, count).double().log_().mul_(0.9 / 1.3).float()
        assert torch.equal(delays(library, race, None, count), expected)
    ids = torch.randperm(5000)[:777]
    expected = noise(seed, 12, 5000).double().log_().mul_(0.9 / 1.3).float()[ids]
    assert torch.equal(delays(library, race, ids, 777), expected)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("size", [1, 33, 4096])
def test_the_draw_is_that_of_the_distribution(settings: dict[str, float], size: int) -> None:
    """Where rounding could decide it says so, which must stay rare."""
    params, fast = SamplingParams(**{"temperature": 1.0, **settings}), native_draw(CPU)  # type: ignore[arg-type]
    assert fast is not None
    generator, unsure = torch.Generator().manual_seed(size), 0
    for seed in range(60):
        logits = torch.randn(size, generator=generator) * (1 + seed % 9)
        token, position = fast(logits, params, seed, 3 * seed), 3 * seed
        expected = draw(distribution(logits, params), seed, position)
        assert token in (expected, None)
        unsure += token is None
    assert unsure <= 2


def test_equal_logits_and_barred_tokens(library: Library) -> None:
    fast = native_draw(CPU)
    assert fast is not None
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=0.5, top_k=3, top_p=0.6)):
        for seed in range(200):
            logits = torch.randint(0, 4, (40,), generator=torch.Generator().manual_seed(seed)).float()
            logits[::3] = -math.inf
            token = fast(logits, params, seed, 1)
            assert token in (draw(distribution(logits, params), seed, 1), None)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 7, 99])
def test_what_is_no_number_is_left_to_python(value: float, place: int) -> None:
    fast, warm = native_draw(CPU), SamplingParams(temperature=1.0)
    assert fast is not None
    logits = torch.zeros(100)
    logits[place] = value
    assert fast(logits, warm, 1, 1) is None
    with pytest.raises(ValueError, match="NaN"):
        TokenChooser(warm, 1, 0, fast=fast)(logits, [])
    assert fast(torch.full((100,), -math.inf), warm, 1, 1) is None
    assert fast(torch.zeros(100), SamplingParams(temperature=1e-40), 1, 1) is None
    assert fast(torch.zeros(100).double(), warm, 1, 1) is None
    assert fast(torch.zeros(200)[::2], warm, 1, 1) is None


def test_other_devices_have_none() -> None:
    assert native_draw(torch.device("meta")) is None
