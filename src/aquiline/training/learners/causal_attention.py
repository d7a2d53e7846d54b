"""Computes causal attention with its log-sum-exp, and a backward that accepts an external log-sum-exp.

The unroll of training merges causal attention with single keys (`aquiline.training.learners.unroll`), for
which it needs the log-sum-exp of the causal part and gradients under the merged softmax. On the
CPU PyTorch's flash attention does both. No public operator does on other devices, so there blocks of
query rows are computed one after another: memory stays linear in the length, as with flash.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

FLASH_DEVICES = ("cpu",)
"""Device types whose flash attention accepts an external log-sum-exp in its backward."""

ROWS = 256
"""Query rows of a block: their scores are the largest thing in memory."""


def causal_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attends causally.

    Args:
        q: (B, heads, T, dim).
        k: (B, kv_heads, T, dim); kv_heads divides heads.
        v: as `k`.
        scale: factor on the scores.
        mask: (B, T, T) additive, including the causal order, or None for causal.

    Returns:
        Output (B, heads, T, dim) in the dtype of `q`, log-sum-exp (B, heads, T) in at least float32.
    """
    k, v = _expand(k, q.shape[1]), _expand(v, q.shape[1])
    if q.device.type not in FLASH_DEVICES:
        return blocks_forward(q, k, v, scale, mask)
    out, lse = _FLASH(q, k, v, 0.0, mask is None, attn_mask=_four_axes(mask), scale=scale)
    return out, lse


def causal_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the causal part of a softmax.

    Args:
        grad: (B, heads, T, dim), of `out`.
        q: as in `causal_forward`, like `k`, `v`, `scale` and `mask`.
        out: (B, heads, T, dim) output of the whole softmax.
        lse: (B, heads, T) log-sum-exp of the whole softmax.

    Returns:
        Gradients of q, k and v.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    k, v = _expand(k, heads), _expand(v, heads)
    if q.device.type not in FLASH_DEVICES:
        grads = blocks_backward(grad, q, k, v, out, lse, scale, mask)
    else:
        grads = _FLASH_BACKWARD(grad, q, k, v, out, lse, 0.0, mask is None, attn_mask=_four_axes(mask), scale=scale)
    grad_q, grad_k, grad_v = grads
    if kv_heads != heads:
        grad_k = _sum_groups(grad_k, kv_heads)
        grad_v = _sum_groups(grad_v, kv_heads)
    return grad_q, grad_k, grad_v


def blocks_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """`causal_forward` for heads = kv_heads on any device."""
    out, sums = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    for rows in _blocks(q.shape[2]):
        scores = _scores(q, k, scale, mask, rows)
        sums[:, :, rows] = scores.logsumexp(-1)
        weights = (scores - sums[:, :, rows, None]).exp()
        out[:, :, rows] = weights.to(v.dtype) @ v[:, :, : rows.stop]
    return out, sums


def blocks_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`causal_backward` for heads = kv_heads on any device."""
    grad_q = torch.empty_like(q)
    grad_k, grad_v = torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)
    for rows in _blocks(q.shape[2]):
        weights = (_scores(q, k, scale, mask, rows) - lse[:, :, rows, None]).exp()
        seen, above = slice(0, rows.stop), grad[:, :, rows]
        grad_v[:, :, seen] += weights.to(v.dtype).transpose(2, 3) @ above
        slopes = weights * ((above @ v[:, :, seen].transpose(2, 3)).to(lse.dtype) - delta[:, :, rows]) * scale
        grad_q[:, :, rows] = slopes.to(k.dtype) @ k[:, :, seen]
        grad_k[:, :, seen] += slopes.to(q.dtype).transpose(2, 3) @ q[:, :, rows]
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _blocks(width: int) -> Iterator[slice]:
    for start in range(0, width, ROWS):
        yield slice(start, min(start + ROWS, width))


def _scores(q: Tensor, k: Tensor, scale: float, mask: Tensor | None, rows: slice) -> Tensor:
    """Scores (B, heads, rows, rows.stop) of a block of rows, in at least float32; no later key is seen."""
    scores = (q[:, :, rows] @ k[:, :, : rows.stop].transpose(2, 3)).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores * scale
    if mask is not None:
        return scores + mask[:, None, rows, : rows.stop]
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1 + rows.start)
    return scores.masked_fill_(hidden, float("-inf"))


def _expand(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_groups(x: Tensor, kv_heads: int) -> Tensor:
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]).sum(2)


def _four_axes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask[:, None]
