"""Losses of the draft heads, computed where they count and without holding logits twice.

All of them take rows that were gathered beforehand: N rows that count, of hidden size H, over a
vocabulary of Vd. The softmax runs in float32 whatever the dtype of the matrices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROWS = 2048  # rows whose logits are held at once
_CHUNK = 128  # rows of one float32 softmax: 4 MB at 8192 ids, which stays in the cache


def soft_cross_entropy(
    hidden: Tensor, weight: Tensor, probs: Tensor, index: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ scale · −Σ_v p log softmax(hidden weightᵀ), with the gradients made on the way.

    Args:
        hidden: (N, H) normed hidden states.
        weight: (Vd, H) LM head.
        probs: (M, Vd) target distributions; may be shared by many rows.
        index: (N,) int64, the row of `probs` that row n should predict.
        scale: (N,) float32, weight of each row in the loss.

    Returns:
        The scalar loss; the unscaled cross-entropy (N,) and the most probable draft id (N,),
        both without gradient.
    """
    loss, rows, best = _SoftCrossEntropy.apply(hidden, weight, probs, index, scale)  # type: ignore[no-untyped-call]
    return loss, rows, best


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, probs: Tensor, index: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        rows = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        best = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        for start in range(0, len(hidden), _ROWS):
            block = slice(start, start + _ROWS)
            logits = hidden[block] @ weight.t()
            for first in range(0, len(logits), _CHUNK):
                part = slice(start + first, min(start + first + _CHUNK, start + len(logits)))
                rows[part], best[part] = _chunk(logits[first : first + _CHUNK], probs[index[part]], scale[part], wide)
            grad_hidden[block] = logits @ weight
            partial = (logits.t() @ hidden[block]).to(wide)
            grad_weight = partial if grad_weight is None else grad_weight.add_(partial)
        if grad_weight is None:
            grad_weight = torch.zeros_like(weight, dtype=wide)
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(rows, best)
        return (rows * scale).sum(), rows, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_hidden, grad_weight = ctx.saved_tensors
        # The loss itself is the root of the graph or nearly so: the factor is a scalar.
        factor = grads[0]
        if factor.item() != 1.0:
            grad_hidden, grad_weight = grad_hidden * factor, grad_weight * factor
        return grad_hidden, grad_weight, None, None, None


def _chunk(logits: Tensor, probs: Tensor, scale: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Overwrites `logits` by scale · (softmax − p); returns cross-entropies and best ids."""
    scores, target = logits.to(wide), probs.to(wide)
    top, best = scores.max(-1)
    expected = torch.linalg.vecdot(scores, target)
    scores = scores.sub_(top[:, None]).exp_()
    total = scores.sum(-1)
    mass = target.sum(-1)  # 1 up to the rounding of stored probabilities
    factor = scale * mass / total
    scores.mul_(factor[:, None])
    torch.addcmul(scores, target, -scale.to(wide)[:, None], out=scores)
    logits.copy_(scores)
    return mass * (top + total.log()) - expected, best


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
