"""Masks and grouped attention over a cache, shared by targets and draft heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.cache import KVCache
from aquiline.tree import index_on, select


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the T tokens of one forward go in the cache.

    Attributes:
        rows: the B rows; a slice if they are contiguous, so that reads are views.
        slots: the same rows as numbers.
        starts: slot of the first new token of each row, its committed length plus `offset`.
        width: T.
        span: slots that the attention reads, at least max(starts) + T.
        offset: uncommitted slots before the new tokens (earlier levels of a draft tree).
    """

    rows: slice | Tensor
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    width: int
    span: int
    offset: int = 0


def place(cache: KVCache, rows: Sequence[int], width: int, offset: int = 0, bucket: int = 1) -> Placement:
    """Reserves room for `width` more tokens in `rows`.

    Args:
        cache: the cache.
        rows: rows of the forward.
        width: T.
        offset: uncommitted slots in use before the new tokens.
        bucket: rounds the span up to a multiple; the extra slots are masked.

    Mutates: the capacity of `cache` if it is too small.
    """
    lengths = cache.lengths.tolist()
    starts = tuple(lengths[row] + offset for row in rows)
    span = -(-(max(starts) + width) // bucket) * bucket
    cache.reserve(span)
    return Placement(select(cache.key_block.device, rows), tuple(rows), starts, width, span, offset)


def write(cache: KVCache, layer: int, placement: Placement, keys: Tensor, values: Tensor) -> None:
    """Writes (B, kv_heads, T, dim) keys and values after the committed positions."""
    starts, width = placement.starts, placement.width
    for block, new in ((cache.keys(layer), keys), (cache.values(layer), values)):
        if isinstance(placement.rows, slice) and all(s == starts[0] for s in starts):
            block[placement.rows, :, starts[0] : starts[0] + width] = new
            continue
        for i, (row, start) in enumerate(zip(placement.slots, starts, strict=True)):
            block[row, :, start : start + width] = new[i]


def read(cache: KVCache, layer: int, placement: Placement) -> tuple[Tensor, Tensor]:
    """Returns keys and values (B, kv_heads, span, dim); views where the rows are contiguous."""
    keys, values = cache.keys(layer), cache.values(layer)
    if isinstance(placement.rows, slice):
        return keys[placement.rows, :, : placement.span], values[placement.rows, :, : placement.span]
    return (
        keys.index_select(0, placement.rows)[:, :, : placement.span],
        values.index_select(0, placement.rows)[:, :, : placement.span],
    )


def attention_mask(
    placement: Placement,
    positions: Tensor,
    ancestors: Tensor | None,
    window: int | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """Builds the additive mask (B, T, span), or None if everything is visible.

    Args:
        placement: location of the tokens.
        positions: (B, T) int64 positions of the new tokens.
        ancestors: (B, T, offset + T) bool over the uncommitted slots; None for causal order.
        window: a query at position p sees keys at positions > p - window; None for all.
            Needs ``offset == 0``.
        dtype: float dtype of the result.
    """
    starts, width, span, offset = placement.starts, placement.width, placement.span, placement.offset
    same = all(start == starts[0] for start in starts)
    exact = same and span == starts[0] + width
    if ancestors is None and width == 1 and exact and (window is None or span <= window):
        return None
    device = positions.device
    tail = offset + width
    if ancestors is None:
        causal = torch.ones(width, tail, dtype=torch.bool, device=device).tril(offset)
        ancestors = causal.expand(len(starts), -1, -1)
    committed: int | Tensor = starts[0] - offset
    if not same:  # The first new token follows the committed ones; the levels of a tree share one copy.
        committed = index_on(device, *(start - offset for start in starts))[:, None] if offset else positions[:, :1]
    slots = torch.arange(span, device=device)[None, :]
    relative = (slots - committed).expand(len(starts), -1)  # (B, span), index among the uncommitted slots
    inside = (relative >= 0) & (relative < tail)
    index = relative.clamp(0, tail - 1)
    among_new = ancestors.gather(2, index[:, None, :].expand(-1, width, -1))
    visible = (relative < 0)[:, None, :] | (among_new & inside[:, None, :])
    if window is not None:
        assert offset == 0, "a sliding window needs the positions of all uncommitted slots"
        # A committed slot is its own position; a tree node's position is its depth, not its slot.
        key_positions = torch.where(inside, positions.gather(1, index), slots)
        visible &= positions[:, :, None] - key_positions[:, None, :] < window
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Grouped-query attention with the softmax in at least float32.

    Args:
        queries: (B, heads, T, dim).
        keys: (B, kv_heads, S, dim).
        values: (B, kv_heads, S, value_dim).
        mask: (B, T, S) additive, or None.
        scale: factor on the scores.

    Returns:
        (B, T, heads * value_dim) in the dtype of `queries`.
    """
    batch, heads, width, dim = queries.shape
    kv_heads = keys.shape[1]
    # Query heads of a group share their keys: fold the group into the query axis instead of copying keys.
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads * width, dim)
    scores = torch.matmul(grouped, keys.transpose(2, 3)) * scale
    accurate = torch.promote_types(scores.dtype, torch.float32)
    scores = scores.to(accurate).view(batch, kv_heads, heads // kv_heads, width, -1)
    if mask is not None:
        scores = scores + mask[:, None, None]
    weights = torch.softmax(scores, dim=-1).to(queries.dtype)
    mixed = torch.matmul(weights.view(batch, kv_heads, -1, weights.shape[-1]), values)
    mixed = mixed.view(batch, heads, width, -1).transpose(1, 2)
    return mixed.reshape(batch, width, -1)
