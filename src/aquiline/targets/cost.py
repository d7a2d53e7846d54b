"""Measures the cost of a target forward by its number of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from aquiline.cache import commit
from aquiline.targets.target import Target, TargetInput

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of tokens per forward that are timed."""

CONTEXT = 256
"""Committed tokens before the timed forwards."""


@torch.inference_mode()
def cost_curve(
    target: Target, sizes: Sequence[int] = SIZES, *, context: int = CONTEXT, repeats: int = 15
) -> list[dict[str, float]]:
    """Measures the seconds of a forward of M tokens after `context` committed tokens.

    The sizes take turns, so that a slow moment of the machine affects all of them; the median counts.

    Returns:
        ``{"tokens": M, "seconds": median, "low": 10th percentile, "high": 90th}`` per size.
    """
    context = min(context, target.shape.max_positions - max(sizes))
    vocabulary, device = target.shape.vocab_size, target.device
    generator = torch.Generator().manual_seed(0)
    cache = target.new_cache(1, context + max(sizes))
    prompt = torch.randint(0, vocabulary, (1, context), generator=generator).to(device)
    none = torch.empty(1, 0, dtype=torch.int64, device=device)
    positions = torch.arange(context + max(sizes), device=device)[None]
    target.forward(TargetInput(prompt, positions[:, :context], None, cache, [0], (), none))
    commit(cache, torch.arange(context)[None], [0])
    draft = torch.randint(0, vocabulary, (1, max(sizes)), generator=generator).to(device)

    def forward(size: int) -> None:
        # Nothing is committed, so every forward sees the same cache.
        target.forward(TargetInput(draft[:, :size], positions[:, context : context + size], None, cache, [0]))

    return _interleaved(forward, sizes, repeats, device)


def step_costs(target: Target) -> list[dict[str, float]] | None:
    """Measures in a few forwards what `aquiline.drafters.prices.Costs` begins with; None for devices other than CPUs.

    The devices' default is a large tree, whose pruning has not been measured there.
    """
    if target.device.type != "cpu" or target.shape.max_positions < 64:
        return None
    return cost_curve(target, (1, 2, 4, 8, 16), context=32, repeats=2)


def _interleaved(
    run: Callable[[int], None], sizes: Sequence[int], repeats: int, device: torch.device
) -> list[dict[str, float]]:
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(repeats + 2):  # two rounds to warm up
        for size in sizes:
            start = time.perf_counter()
            run(size)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repeat >= 2:
                times[size].append(time.perf_counter() - start)
    curve = []
    for size, values in times.items():
        low, middle, high = (float(v) for v in np.percentile(values, (10, 50, 90)))
        curve.append({"tokens": size, "seconds": middle, "low": low, "high": high})
    return curve


def seconds_at(curve: Sequence[dict[str, float]], tokens: float) -> float:
    """Interpolates the curve: linear between its points, constant before, extrapolated after."""
    points = sorted((point["tokens"], point["seconds"]) for point in curve)
    if tokens <= points[0][0] or len(points) == 1:
        return points[0][1]
    right = next((i for i, (x, _) in enumerate(points) if tokens <= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)
