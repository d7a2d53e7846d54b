"""Computes the losses of draft heads at the positions that count, without holding logits twice.

The inputs are gathered rows: N rows that count, of hidden size H, over a vocabulary of Vd. The softmax runs in float32
whatever the dtype of the matrices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROWS = 2048  # rows whose logits are held at once
_CHUNK = 128  # rows of one float32 softmax: 4 MB at 8192 ids, which stays in the cache


def distribution_loss(
    hidden: Tensor, weight: Tensor, probs: Tensor, index: Tensor, scale: Tensor, rule: str = "kl"
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ scale · loss(p, q) with q = softmax(hidden weightᵀ); gradients are made on the way.

    ``kl``: the soft cross-entropy −Σ p log q, the Kullback-Leibler divergence up to a constant.
    ``tv``: 1 − α, where α = Σ min(p, q) is the probability that speculative sampling accepts;
    this is the total variation. ``lk``: −log α, which does not fade where α is small.

    Args:
        hidden: (N, H) normed hidden states.
        weight: (Vd, H) LM head.
        probs: (M, Vd) target distributions p; may be shared by many rows.
        index: (N,) int64, the row of `probs` that row n should predict.
        scale: (N,) float32, weight of each row in the loss.
        rule: "kl", "tv" or "lk".

    Returns:
        The scalar loss; the unscaled loss (N,) and the most probable draft id (N,), both
        without gradient.

    Source: lk: LK losses (arXiv 2602.23881).
    """
    loss, rows, best = _DistributionLoss.apply(hidden, weight, probs, index, scale, rule)  # type: ignore[no-untyped-call]
    return loss, rows, best


class _DistributionLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        probs: Tensor,
        index: Tensor,
        scale: Tensor,
        rule: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        trained = ctx.needs_input_grad[1]  # EAGLE-1 reads through the target's frozen LM head
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=wide) if trained else None
        rows = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        best = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        for start in range(0, len(hidden), _ROWS):
            block = slice(start, start + _ROWS)
            logits = hidden[block] @ weight.t()
            for first in range(0, len(logits), _CHUNK):
                part = slice(start + first, min(start + first + _CHUNK, start + len(logits)))
                p = probs[index[part]].to(wide)
                chunk = logits[first : first + _CHUNK]
                rows[part], best[part] = _chunk(chunk, p, scale[part].to(wide), rule)
            grad_hidden[block] = logits @ weight
            if grad_weight is not None:
                grad_weight += logits.t() @ hidden[block]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(rows, best)
        return (rows * scale).sum(), rows, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_hidden, grad_weight = ctx.saved_tensors
        factor = grads[0]
        if factor.item() != 1.0:
            grad_hidden = grad_hidden * factor
            grad_weight = None if grad_weight is None else grad_weight * factor
        return grad_hidden, grad_weight, None, None, None, None


def _chunk(logits: Tensor, p: Tensor, scale: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """Overwrites `logits` by the gradient of scale · loss; returns losses and best ids."""
    scores = logits.to(p.dtype)
    top, best = scores.max(-1)
    if rule == "kl":
        mass = p.sum(-1)  # 1 up to the rounding of stored probabilities
        expected = torch.linalg.vecdot(scores, p)
        scores.sub_(top[:, None]).exp_()
        total = scores.sum(-1)
        scores.mul_((scale * mass / total)[:, None])
        torch.addcmul(scores, p, -scale[:, None], out=scores)
        logits.copy_(scores)
        return mass * (top + total.log()) - expected, best
    q = torch.softmax(scores, dim=-1)
    below = q < p
    accepted = torch.where(below, q, p).sum(-1)
    # d α / d logit_v = q_v (1[q_v < p_v] − Σ of q where q < p)
    slope = q * (below.to(q.dtype) - (q * below).sum(-1, keepdim=True))
    factor = -scale if rule == "tv" else -scale / accepted.clamp(min=1e-6)
    logits.copy_(slope.mul_(factor[:, None]))
    loss = 1 - accepted if rule == "tv" else -accepted.clamp(min=1e-6).log()
    return loss, best


def restricted_probs(final: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Target distribution over the draft vocabulary alone, renormalised.

    Args:
        final: (M, H) the target's "final" features.
        weight: (Vd, H) the rows of its LM head that the draft vocabulary names.

    Returns:
        (M, Vd) probabilities in the dtype of `final`, and (M,) int64 the most probable ids.
    """
    probs = final @ weight.t()
    best = torch.empty(len(probs), dtype=torch.int64, device=probs.device)
    for first in range(0, len(probs), _CHUNK):
        part = probs[first : first + _CHUNK]
        wide = part.to(torch.promote_types(part.dtype, torch.float32))
        best[first : first + _CHUNK] = wide.argmax(-1)
        part.copy_(torch.softmax(wide, dim=-1))
    return probs, best


def feature_loss(predicted: Tensor, wanted: Tensor, scale: Tensor) -> Tensor:
    """Σ scale · mean over H of SmoothL1(predicted − wanted), both (N, H)."""
    wide = torch.promote_types(predicted.dtype, torch.float32)
    errors = torch.nn.functional.smooth_l1_loss(predicted.to(wide), wanted.to(wide), reduction="none")
    return (errors.mean(-1) * scale).sum()
