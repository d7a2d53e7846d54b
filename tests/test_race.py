"""The noise of a race: reproducible from its definition, uniform, and independent between positions and tokens."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch

from aquiline.race import draw, key, noise, uniform

WORD = (1 << 32) - 1


def mixed(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & WORD
    x ^= x >> 15
    x = x * 0x846CA68B & WORD
    return x ^ x >> 16


def twin(seed: int, position: int, token: int) -> float:
    """The definition in the docstring, in Python's integers and the C library's logarithm."""
    k = key(seed, position)
    x = mixed((mixed((token * 0x9E3779B1 + (k >> 32)) & WORD) + (k & WORD)) & WORD)
    return struct.unpack("f", struct.pack("f", -math.log((x + 0.5) / 2**32)))[0]


@pytest.mark.parametrize("seed", [0, 5, -1, (1 << 64) - 1, -(1 << 63)])
def test_noise_has_the_bits_of_its_definition(seed: int) -> None:
    for position in (0, 1, 4096):
        tokens = [0, 1, 7, 49151, 262143]
        expected = [twin(seed, position, token) for token in tokens]
        assert noise(seed, position, np.array(tokens, dtype=np.uint32)).tolist() == expected
        assert noise(seed, position, 8).tolist()[:2] == expected[:2]


def test_known_noise_stays() -> None:
    """A release that changes these numbers changes what every seed gives: say so in the change log."""
    assert key(1, 2) == 0x1D0B14E4DB018FED
    assert noise(1, 2, 3).tolist() == pytest.approx(
        [0.6539677977561951, 0.6358232498168945, 1.968369483947754], rel=1e-7
    )


def test_the_largest_and_smallest_noise_are_finite_and_positive() -> None:
    values = torch.tensor([0.5, 2**32 - 0.5], dtype=torch.float64).mul(2.0**-32).log().neg().float()
    assert values[0] < 23 and values[1] > 1e-10
    everything = noise(3, 4, 1 << 20)
    assert float(everything.min()) > 0 and float(everything.max()) < 23


def chi_square(numbers: torch.Tensor, bins: int) -> float:
    counts = torch.histc(numbers.double(), bins, 0, 1)
    expected = len(numbers) / bins
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("tokens", [49152, 200])
def test_noise_is_exponential_within_a_position_and_over_positions(tokens: int) -> None:
    """Chi-square with 63 degrees of freedom; 131.7 is exceeded once in a million."""
    rows = torch.stack([noise(11, position, tokens) for position in range(64)]).neg().exp()
    assert chi_square(rows.flatten(), 64) < 131.7
    assert chi_square(rows[5], 64) < 131.7 and chi_square(rows[:, 7], 8) < 40.52
    seeds = torch.stack([noise(seed, 3, tokens) for seed in range(64)]).neg().exp()
    assert chi_square(seeds.flatten(), 64) < 131.7


@pytest.mark.parametrize("apart", ["tokens", "positions", "seeds"])
def test_neighbours_are_independent(apart: str) -> None:
    """Chi-square of the joint law of two neighbours, 8 × 8 cells; 131.7 is exceeded once in a million."""
    if apart == "tokens":
        rows = torch.stack([noise(2, position, 1001) for position in range(100)])
        pairs = rows[:, :-1], rows[:, 1:]
    else:
        keys = [(position, 0) if apart == "seeds" else (0, position) for position in range(101)]
        rows = torch.stack([noise(seed, position, 1000) for seed, position in keys])
        pairs = rows[:-1], rows[1:]
    first, second = ((values.neg().exp() * 8).long().clamp(max=7) for values in pairs)
    assert chi_square((8 * first + second).flatten() / 64 + 1 / 128, 64) < 131.7


def test_rare_tokens_win_as_often_as_they_should() -> None:
    """1,024 tokens share 1 % and the rest is one token's: 20,000 draws, five standard deviations."""
    probs = torch.full((1025,), 0.01 / 1024)
    probs[0] = 0.99
    rare = sum(draw(probs, 21, position) > 0 for position in range(20_000))
    assert abs(rare - 200) < 5 * math.sqrt(200)


def test_coins_do_not_depend_on_the_draws() -> None:
    """Coin and draw, 2 × 2 cells; chi-square with one degree of freedom, one in a million."""
    probs = torch.tensor([0.5, 0.5])
    counts = torch.zeros(2, 2)
    for position in range(4000):
        counts[int(uniform(9, position) < 0.5), draw(probs, 9, position)] += 1
    expected = counts.sum(1, keepdim=True) * counts.sum(0) / 4000
    assert float(((counts - expected) ** 2 / expected).sum()) < 23.93
