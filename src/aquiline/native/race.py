"""Races of the kernels: the target's draw, and the delays that drafts race with; see `aquiline.race`."""

from __future__ import annotations

import torch
from torch import Tensor

from aquiline.native.library import Library, Race, find_library
from aquiline.sampling import SamplingParams, TokenDraw

_WORD = (1 << 64) - 1
_MOST = 2**31 - 1


def race_of(params: SamplingParams, seed: int, position: int, gamma: float) -> Race:
    """Describes the race for an output position; `gamma` is the exponent of the racing probabilities."""
    return Race(
        seed & _WORD, position, params.temperature / gamma,
        params.temperature, params.top_p, params.min_p, min(params.top_k, _MOST),
    )  # fmt: skip


def native_draw(device: torch.device) -> TokenDraw | None:
    """Returns the kernels' draw; None where they do not run."""
    library = find_library()[0] if device.type == "cpu" else None
    if library is None:
        return None
    call = library.draw

    def draw(scores: Tensor, params: SamplingParams, seed: int, position: int) -> int | None:
        if scores.dtype != torch.float32 or not scores.is_contiguous():
            return None
        token = call(race_of(params, seed, position, 1.0), scores.data_ptr(), len(scores))
        return None if token < 0 else token

    return draw


def delays(library: Library, race: Race, draft_to_target: Tensor | None, size: int) -> Tensor:
    """Returns (size,) float32 logarithms of the noise of draft ids, times the race's factor.

    Args:
        draft_to_target: (size,) int64 on the CPU, or None if the ids coincide.
    """
    out = torch.empty(size)
    ids = None if draft_to_target is None else draft_to_target.data_ptr()
    library.delays(race, ids, size, out.data_ptr())
    return out
