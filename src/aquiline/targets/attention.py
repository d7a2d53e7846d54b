"""Computes masks and grouped attention over a cache for targets and draft heads, in few kernels on GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from aquiline.cache import KVCache
from aquiline.targets.layers import Attention
from aquiline.targets.rope import RotaryTable, rotate
from aquiline.tree import index_on, select


@dataclass(frozen=True, eq=False)
class Placement:
    """Places of a forward's T tokens in the cache.

    Attributes:
        rows: the B rows; a slice if they are contiguous, so that reads are views.
        starts: slot of the first new token of each row, its committed length plus `offset`; empty in a forward
            of static shape, whose `cells` say it.
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


def _committed(placement: Placement, positions: Tensor) -> Tensor:
    """Returns the committed lengths of the rows, (B, 1) int64 on the device of `positions`."""
    if placement.offset == 0:
        return positions[:, :1]  # the first new token follows the committed ones
    # The levels of a tree share one copy.
    return index_on(positions.device, *(start - placement.offset for start in placement.starts))[:, None]


def attention_mask(
    placement: Placement,
    positions: Tensor,
    ancestors: Tensor | None,
    window: int | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """Builds the additive mask (B, T, span), or None if everything is visible.

    Args:
        positions: (B, T) int64 positions of the new tokens.
        ancestors: (B, T, offset + T) bool over the uncommitted slots; None for causal order.
        window: a query at position p sees keys at positions > p - window, for ``offset == 0``; None for all.
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
    if not same:
        committed = _committed(placement, positions)
    assert offset == 0 or window is None, "a sliding window needs the positions of all uncommitted slots"
    return _additive(committed, positions, ancestors, span, window, dtype)


def _additive(
    committed: int | Tensor, positions: Tensor, ancestors: Tensor, span: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Builds the additive mask (B, T, span) of rows with `committed` tokens, one number or (B, 1) int64."""
    width, tail = ancestors.shape[1:]
    slots = torch.arange(span, device=positions.device)[None, :]
    relative = (slots - committed).expand(len(positions), -1)  # (B, span), index among the uncommitted slots
    inside = (relative >= 0) & (relative < tail)
    index = relative.clamp(0, tail - 1)
    among_new = ancestors.gather(2, index[:, None, :].expand(-1, width, -1))
    visible = (relative < 0)[:, None, :] | (among_new & inside[:, None, :])
    if window is not None:
        # A committed slot is its own position; a tree node's position is its depth, not its slot.
        key_positions = torch.where(inside, positions.gather(1, index), slots)
        visible &= positions[:, :, None] - key_positions[:, None, :] < window
    mask = torch.zeros(visible.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


@dataclass(frozen=True, eq=False)
class AttentionFrame:
    """The state that all layers of one forward share.

    Attributes:
        cos: (B, T, dim).
        sin: (B, T, dim).
        masks: window → additive mask: (B, T, span); in a fused forward (B, 1, T · group, span).
        turned: in a fused forward, `sin` with its first half negated; None elsewhere.
        cells: in a fused forward of static shape or of rows of different lengths, (B, 1) rows and (B, T) slots of
            the new keys.
    """

    cache: KVCache
    placement: Placement
    cos: Tensor
    sin: Tensor
    masks: Mapping[int | None, Tensor | None]
    turned: Tensor | None = None
    cells: tuple[Tensor, Tensor] | None = None


def attention_frame(
    cache: KVCache,
    placement: Placement,
    positions: Tensor,
    ancestors: Tensor | None,
    rotary: RotaryTable,
    windows: Sequence[int | None],
    group: int,
    fused: bool,
) -> AttentionFrame:
    """Prepares the frame of one forward.

    Args:
        positions: (B, T) int64.
        ancestors: as for `attention_mask`.
        rotary: the table; its dtype is that of the masks.
        group: query heads of a key head.
        fused: prepare for `attention_output` in few kernels.
    """
    cos, sin = rotary.at(positions, placement.span)
    masks = {w: attention_mask(placement, positions, ancestors, w, rotary.dtype) for w in set(windows)}
    if not fused:
        return AttentionFrame(cache, placement, cos, sin, masks)
    cells = None
    if len(set(placement.starts)) > 1 or not isinstance(placement.rows, slice):
        new = torch.arange(placement.offset, placement.offset + placement.width, device=positions.device)
        cells = index_on(new.device, *placement.slots)[:, None], _committed(placement, positions) + new
    return _fused(AttentionFrame(cache, placement, cos, sin, masks, cells=cells), group)


def static_frame(
    cache: KVCache,
    span: int,
    lengths: Tensor,
    positions: Tensor,
    ancestors: Tensor | None,
    rotary: tuple[Tensor, Tensor],
    windows: Sequence[int | None],
    group: int,
) -> AttentionFrame:
    """Prepares the fused frame of a forward on the first B rows, with no branch on their lengths.

    Args:
        span: slots that the attention reads; the cache has them already.
        lengths: (B, 1) int64 committed tokens of each row.
        positions: (B, T) int64.
        ancestors: as for `attention_mask`.
        rotary: cos and sin of all positions below the cache's capacity.
        group: query heads of a key head.
    """
    (rows, width), device, (cos, sin) = positions.shape, positions.device, rotary
    if ancestors is None:
        ancestors = torch.ones(width, width, dtype=torch.bool, device=device).tril().expand(rows, -1, -1)
    masks: dict[int | None, Tensor | None] = {
        w: _additive(lengths, positions, ancestors, span, w, cos.dtype) for w in dict.fromkeys(windows)
    }
    cells = torch.arange(rows, device=device)[:, None], lengths + torch.arange(width, device=device)
    placement = Placement(slice(0, rows), tuple(range(rows)), (), width, span)
    return _fused(AttentionFrame(cache, placement, cos[positions], sin[positions], masks, cells=cells), group)


def _fused(frame: AttentionFrame, group: int) -> AttentionFrame:
    """Prepares the masks and the sines of a frame for `attention_output` in few kernels."""
    masks = {w: None if mask is None else mask.repeat(1, group, 1)[:, None] for w, mask in frame.masks.items()}
    first, second = frame.sin.chunk(2, dim=-1)
    return replace(frame, masks=masks, turned=torch.cat((-first, second), dim=-1))


def attention_output(
    attention: Attention, x: Tensor, frame: AttentionFrame, layer: int, window: int | None, rotated: bool
) -> Tensor:
    """Computes an attention up to its output projection, (B, T, input_size) → (B, T, heads · head_dim).

    Args:
        frame: of the forward; keys and values are written into its cache.
    """
    cache, placement, mask = frame.cache, frame.placement, frame.masks[window]
    if frame.turned is None:
        q, k, v = attention.qkv(x, frame.cos if rotated else None, frame.sin if rotated else None)
        write(cache, layer, placement, k, v)
        keys, values = read(cache, layer, placement)
        return attend(q, keys, values, mask, attention.scale)
    q, k, v = _fused_qkv(attention, x, frame, rotated)
    for block, new in ((cache.keys(layer), k), (cache.values(layer), v)):
        if frame.cells is None:
            block[placement.rows, :, placement.starts[0] : placement.starts[0] + placement.width] = new.transpose(1, 2)
        else:
            rows, slots = frame.cells
            block[rows, :, slots] = new  # of the block itself: torch.compile would copy it to write through a view
    keys, values = read(cache, layer, placement)
    batch, width, heads, dim = q.shape
    kv_heads = keys.shape[1]
    # Query heads of a group share their keys: folded into the query axis, they need no `enable_gqa`, which
    # CUDA's fused kernels do not take together with a mask.
    grouped = q.view(batch, width, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mixed = nn.functional.scaled_dot_product_attention(grouped, keys, values, mask, scale=attention.scale)
    mixed = mixed.view(batch, kv_heads, heads // kv_heads, width, -1).permute(0, 3, 1, 2, 4)
    return mixed.reshape(batch, width, -1)


def _fused_qkv(attention: Attention, x: Tensor, frame: AttentionFrame, rotated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Computes q (B, T, heads, dim), k and v (B, T, kv_heads, dim); norms and rotates q and k together."""
    parts = attention.qkv_heads(x)
    split = attention.num_heads + attention.num_kv_heads
    both, v = parts[:, :, :split], parts[:, :, split:]
    both = attention.normed(both)
    if rotated and frame.turned is not None:
        cos, turned = frame.cos[:, :, None], frame.turned[:, :, None]
        if cos.shape[-1] == both.shape[-1]:
            both = torch.addcmul(both * cos, both.roll(cos.shape[-1] // 2, -1), turned)
        else:
            both = rotate(both, cos, frame.sin[:, :, None])
    return both[:, :, : attention.num_heads], both[:, :, attention.num_heads :], v


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Computes grouped-query attention with the softmax in at least float32.

    Args:
        queries: (B, heads, T, dim).
        keys: (B, kv_heads, S, dim).
        values: (B, kv_heads, S, value_dim).
        mask: (B, T, S) additive, or None.

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
