"""Draws the token of an output position by an exponential race, and makes its noise.

Token v finishes at time E_v / p_v, where E_v is standard exponential noise of (seed, position, v), and the first
one wins: with probability p_v. A draft that races with the same noise often has the same winner.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORD = (1 << 64) - 1


def noise(seed: int, position: int, tokens: int | NDArray[np.uint32]) -> Tensor:
    """Returns the noise of some tokens at an output position; a function of its arguments alone.

    With k = `key(seed, position)`, all arithmetic modulo 2³² and ``>>`` a logical shift::

        mix(x): x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
        x = mix(mix(v * 0x9E3779B1 + (k >> 32)) + (k & 0xFFFFFFFF))
        E = float32(-log((x + 0.5) / 2³²))        the logarithm in float64

    The float64 logarithm is rounded to float32 once, so libraries that differ in its last bit agree. A token's
    chance to win is exact to 2⁻³³: noise has 2³² values.

    Args:
        seed: the request's seed, an integer of 64 bits.
        tokens: (n,) token ids, or n for the ids 0 … n − 1.

    Returns:
        (n,) float32 on the CPU, in 1.1e-10 … 23.

    Source: the mixer is C. Wellons' lowbias32.
    """
    k = key(seed, position)
    x = _all_tokens(tokens) if isinstance(tokens, int) else tokens
    x = x * np.uint32(0x9E3779B1)
    for half in (k >> 32, k & 0xFFFFFFFF):
        x += np.uint32(half)
        _mix(x)
    u = torch.from_numpy(x.astype(np.float64))
    return u.add_(0.5).mul_(2.0**-32).log_().neg_().float()


@lru_cache(maxsize=8)
def _all_tokens(count: int) -> NDArray[np.uint32]:
    return np.arange(count, dtype=np.uint32)


def _mix(x: NDArray[np.uint32]) -> None:
    """Applies `noise`'s mixer in place."""
    shifted = x >> np.uint32(16)
    x ^= shifted
    x *= np.uint32(0x7FEB352D)
    np.right_shift(x, np.uint32(15), out=shifted)
    x ^= shifted
    x *= np.uint32(0x846CA68B)
    np.right_shift(x, np.uint32(16), out=shifted)
    x ^= shifted


def key(seed: int, position: int) -> int:
    """Returns 64 bits that differ without pattern between neighbouring positions and seeds.

    SplitMix64's finaliser of ``seed * 0x9E3779B97F4A7C15 + position + 1``, modulo 2⁶⁴.
    """
    x = (seed * 0x9E3779B97F4A7C15 + position + 1) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def draw(probs: Tensor, seed: int, position: int) -> int:
    """Draws the token of output position `position`; deterministic in its arguments.

    Unlike inverting the cumulative sum, a rounding difference in one probability cannot shift the
    outcome between unrelated tokens.
    """
    speeds = probs / noise(seed, position, probs.shape[-1]).to(probs.device)
    return likeliest(speeds, 0.0)


def likeliest(scores: Tensor, nothing: float) -> int:
    """Returns the arg-max of (V,) `scores`, waiting for their device once.

    Args:
        nothing: score of a barred token.

    Raises:
        ValueError: if its score is NaN, or every token is barred.
    """
    token = scores.argmax(-1, keepdim=True)
    exact = torch.promote_types(scores.dtype, torch.float32)  # holds every token id below 2²⁴
    best, token_id = torch.cat((scores.gather(-1, token).to(exact), token.to(exact))).tolist()
    # arg-max prefers NaN to every number
    if math.isnan(best):
        raise ValueError(NOT_A_NUMBER)
    if best == nothing:
        raise ValueError("logit_bias and logits_processors bar every token; leave at least one")
    return int(token_id)


def uniform(seed: int, position: int) -> float:
    """Returns a uniform number in [0, 1) for output position `position`, independent of `draw`."""
    # The complement of the seed selects keys that `noise` never uses.
    return (key(~seed, position) >> 11) * 2.0**-53


NOT_A_NUMBER = (
    "the target's logits are NaN: its weights are damaged, its dtype overflows (float16: load it in bfloat16 or "
    "float32), or logit_bias or logits_processors produced NaN or barred every token"
)
