"""Optimises matrices with Muon and the rest with AdamW, on a warm-up, stable, decay schedule.

Source: Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/); schedule:
MiniCPM (arXiv 2404.06395).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ, _ITERATIONS = (3.4445, -4.7750, 2.0315), 5


def orthogonalise(matrix: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Pulls all singular values of a matrix to about 1 (between 0.7 and 1.2), by Newton-Schulz iterations.

    Args:
        matrix: (m, n).
        dtype: of the iterations.

    Returns:
        (m, n) in the dtype of `matrix`.
    """
    a, b, c = _NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.t() if tall else matrix).to(dtype)
    x = x / (x.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.t() if tall else x).to(matrix.dtype)
    return result


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: each step moves a matrix by the learning rate in every direction.

    Args:
        params: matrices.
        lr: learning rate; a step has the spectral norm lr · √max(1, rows / columns).
        dtype: of the iterations that orthogonalise.
        momentum: Nesterov momentum.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, dtype: torch.dtype, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(state["momentum"], group["momentum"])
                factor = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.add_(orthogonalise(update, self._dtype), alpha=-group["lr"] * factor)


def make_optimisers(
    named: Iterable[tuple[str, nn.Parameter]], lr: float, muon_lr: float, weight_decay: float, dtype: torch.dtype
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices except the LM head, AdamW (0.9, 0.95) for everything else.

    The LM head stays with AdamW: a row per token is not one linear map, and orthogonalising
    8192 × 576 costs as much as all other matrices together.

    Args:
        named: the trainable parameters.
        lr: AdamW's rate.
        muon_lr: Muon's rate; 0 gives AdamW everything.
        weight_decay: AdamW's.
        dtype: in which the run computes; Muon's iterations, too.
    """
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in named:
        muon = muon_lr > 0 and parameter.ndim == 2 and not name.startswith("lm_head")
        (matrices if muon else rest).append(parameter)
    result: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)]
    if matrices:
        result.append(Muon(matrices, muon_lr, dtype))
    return result


def set_rate(optimisers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Sets every learning rate to `factor` times what it was made with."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * factor


def rate_factor(seen: int, *, warmup: int, decay_from: int, decay_to: int, peak: float) -> float:
    """Warm-up, stable, decay: 0 → peak over `warmup`, until `decay_from`, then linearly to 0.

    Args:
        seen: positions seen so far.
        warmup: positions of the warm-up.
        decay_from: where the decay begins.
        decay_to: where the rate reaches 0.
        peak: factor before the decay; below 1 if a running decay was prolonged.
    """
    rising = min(1.0, (seen + 1) / warmup) if warmup > 0 else 1.0
    if seen < decay_from:
        return rising * peak
    return rising * peak * max(0.0, (decay_to - seen) / max(1, decay_to - decay_from))
