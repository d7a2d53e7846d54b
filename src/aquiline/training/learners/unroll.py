"""Unrolls the draft network on its own output, in parallel over all rows: training-time test.

Row t of step i holds the token x[t+1+i], the network's own output of step i-1 at row t (step 0:
the target's feature at t), sits at rotary position t+i and predicts x[t+2+i]. It sees what a
draft of depth i+1 sees: the step-0 keys of rows up to t, and the keys of steps 1 … i at its own
row alone::

    step-0 keys, causal      steps 1 … i, own row only
    t0 t1 t2 t3              t0 t1 t2 t3
    x                        x
    x  x                        x
    x  x  x                        x
    x  x  x  x                        x

So one causal attention and i dot products a row, and memory linear in the number of steps.

Source: EAGLE-3 (arXiv 2503.01840 §3.2, Fig. 6); HASS (arXiv 2408.15766) for EAGLE-1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from aquiline.drafters.eagle_network import Network
from aquiline.targets.rope import RotaryTable
from aquiline.training.learners.causal_attention import causal_backward, causal_forward


def unroll(
    network: Network,
    embedded: Sequence[Tensor],
    hidden: Tensor,
    positions: Tensor,
    rotary: RotaryTable,
    *,
    block_mask: Tensor | None = None,
    recompute: bool = False,
) -> list[Tensor]:
    """Runs one step for each entry of `embedded`.

    Args:
        network: the draft network.
        embedded: per step i, (B, T, H) embeddings of the tokens x[t+1+i].
        hidden: (B, T, H) fused target features.
        positions: (B, T) int64 positions t of the features, restarting with each conversation.
        rotary: the network's rotary table, in the dtype of `hidden`.
        block_mask: (B, T, T) additive and causal, for rows that hold several conversations; None: causal.
        recompute: gradient checkpointing of each layer, whose ends, keys and values are kept.

    Returns:
        Per step, the (B, T, H) stream after the last layer (pre-norm).
    """
    layers = range(network.config.num_layers)
    keys, values = ([list[Tensor]() for _ in layers] for _ in range(2))
    limit, streams = positions.shape[1] + len(embedded), list[Tensor]()
    run: Callable[..., tuple[Tensor, Tensor, Tensor]] = _layer
    if recompute:
        run = partial(checkpoint, _layer, use_reentrant=False, preserve_rng_state=False)
    for step, tokens in enumerate(embedded):
        cos, sin = rotary.at(positions + step, limit)
        stream = network.enter(tokens, hidden)
        for i in layers:
            stream, k, v = run(network, i, stream, tokens, (cos, sin), block_mask, *keys[i], *values[i])
            keys[i].append(k)
            values[i].append(v)
        streams.append(stream)
        hidden = network.feedback(stream)
    return streams


def _layer(
    network: Network,
    index: int,
    stream: Tensor,
    tokens: Tensor,
    rotation: tuple[Tensor, Tensor],
    mask: Tensor | None,
    *past: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer of one step; `past` are the keys and then the values of the steps before.

    Returns:
        The stream after the layer, and this step's keys and values.
    """
    attention = network.attention(index)
    read_from, residual = network.layer_input(index, stream, tokens)
    q, k, v = attention.qkv(read_from, *rotation)
    half = len(past) // 2
    mixed = unrolled_attention(q, [*past[:half], k], [*past[half:], v], attention.scale, mask)
    return network.layer_finish(index, residual, mixed), k, v


def block_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask (B, T, T): causal, and only within one conversation.

    Args:
        segments: (B, T) int64, a number per conversation; padding may share any number.
        dtype: float dtype.
    """
    width = segments.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=segments.device).tril()
    visible = (segments[:, :, None] == segments[:, None, :]) & causal
    mask = torch.zeros(visible.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def unrolled_attention(
    queries: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, mask: Tensor | None = None
) -> Tensor:
    """Attention of one step: causal over the first keys, own row in the later ones.

    Args:
        queries: (B, heads, T, dim).
        keys: per step, (B, kv_heads, T, dim).
        values: as `keys`.
        scale: factor on the scores.
        mask: (B, T, T) additive mask of the first keys, or None for causal.

    Returns:
        (B, T, heads * dim).
    """
    pairs = [tensor for pair in zip(keys, values, strict=True) for tensor in pair]
    result: Tensor = _UnrolledAttention.apply(queries, scale, mask, *pairs)  # type: ignore[no-untyped-call]
    return result.transpose(1, 2).reshape(queries.shape[0], queries.shape[2], -1)


class _UnrolledAttention(torch.autograd.Function):
    """Flash attention over the first keys, merged with one key per later step.

    The flash backward computes P = exp(S - lse) and D = rowsum(dO · O). Given the *merged* lse
    and output, P and D are those of the whole softmax, so it returns the exact gradients of the
    causal part, and those of the single keys are elementwise.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, scale: float, mask: Tensor | None, *pairs: Tensor) -> Tensor:
        keys, values = pairs[0::2], pairs[1::2]
        out, lse = causal_forward(queries, keys[0], values[0], scale, mask)
        if len(keys) > 1:
            scores = [_row_dot(queries, k) * scale for k in keys[1:]]
            merged = torch.stack([lse, *scores]).logsumexp(0)
            mixed = out.float() if out.dtype == torch.bfloat16 else out
            mixed = mixed * (lse - merged).exp().unsqueeze(-1)
            for score, v in zip(scores, values[1:], strict=True):
                weight = (score - merged).exp()
                mixed = mixed + _scale_rows(weight, v)
            out, lse = mixed.to(out.dtype), merged
        ctx.save_for_backward(queries, out, lse, *pairs)
        ctx.scale, ctx.mask = scale, mask
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        queries, out, lse, *pairs = ctx.saved_tensors
        keys, values = pairs[0::2], pairs[1::2]
        grad = grads[0]
        grad_q, grad_k, grad_v = causal_backward(grad, queries, keys[0], values[0], out, lse, ctx.scale, ctx.mask)
        result = [grad_k, grad_v]
        if len(keys) > 1:
            delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            extra = torch.zeros((), dtype=lse.dtype)
            for k, v in zip(keys[1:], values[1:], strict=True):
                weight = (_row_dot(queries, k) * ctx.scale - lse).exp()
                score = weight * (_row_dot(grad, v) - delta) * ctx.scale
                extra = extra + _scale_rows(score, k)
                result.append(_group_sum(score, queries, k))
                result.append(_group_sum(weight, grad, v))
            grad_q = (grad_q.to(lse.dtype) + extra).to(queries.dtype)
        return grad_q, None, None, *result


def _accurate(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _grouped(wide: Tensor, narrow: Tensor) -> Tensor:
    """(B, heads, …) → (B, kv_heads, heads / kv_heads, …), with the kv_heads of `narrow`."""
    return wide.view(wide.shape[0], narrow.shape[1], -1, *wide.shape[2:])


def _row_dot(wide: Tensor, narrow: Tensor) -> Tensor:
    """(B, heads, T, dim) · (B, kv_heads, T, dim) → (B, heads, T), in at least float32."""
    grouped = _grouped(wide, narrow)
    return (_accurate(grouped) * _accurate(narrow).unsqueeze(2)).sum(-1).flatten(1, 2)


def _scale_rows(weight: Tensor, narrow: Tensor) -> Tensor:
    """(B, heads, T) times (B, kv_heads, T, dim) → (B, heads, T, dim)."""
    grouped = _grouped(weight, narrow).unsqueeze(-1)
    return (grouped * narrow.unsqueeze(2)).flatten(1, 2)


def _group_sum(weight: Tensor, wide: Tensor, like: Tensor) -> Tensor:
    """Σ over each group of weight · wide, in the shape and dtype of `like`."""
    scaled = weight.unsqueeze(-1) * wide
    return _grouped(scaled, like).sum(2).to(like.dtype)
