"""Muon's orthogonalisation and the schedule of the learning rate."""

from __future__ import annotations

import pytest
import torch

from aquiline.training.optim import orthogonalise, rate_factor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_orthogonalise_brings_singular_values_near_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape), dtype))
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3


def test_rate_rises_stays_and_falls() -> None:
    factors = [rate_factor(seen, warmup=10, decay_from=50, decay_to=100, peak=1.0) for seen in (0, 4, 30, 50, 75, 100)]
    assert factors == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.5, 0.0])
    assert rate_factor(75, warmup=0, decay_from=50, decay_to=100, peak=0.4) == pytest.approx(0.2)
