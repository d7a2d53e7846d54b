"""Data shared by all layers of one packed forward: angles, masks, and views of the cache.

(No `from __future__ import annotations` here: TorchScript reads the annotations of the tuples.)
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aquiline.cache import KVCache
from aquiline.targets.attention import Placement, attention_mask, place
from aquiline.targets.prepack import Sizes
from aquiline.targets.rope import RotaryTable

KEY_BLOCK = 64
"""Exact forwards pass spans to the attention kernel that are multiples of this."""


class Piece(NamedTuple):
    """The nodes of one call of the attention kernel.

    Attributes:
        begin: first batch row; the cache rows of a piece are consecutive, so that it reads views.
        end: one past its last batch row.
        first: first node.
        last: one past its last node.
        span: slots it reads.
    """

    begin: int
    end: int
    first: int
    last: int
    span: int


class Frame(NamedTuple):
    """Data shared by all layers of one forward.

    Attributes:
        sign: (2, 1), +1 and -1, for `normalise`.
        cos: (B, T, 1, 1, dim), ones beyond the rotated channels.
        sin: as `cos`, negated in its first half and zero beyond the rotated channels, so that a
            rotation is x · cos + swapped(x) · sin.
        half: half of the rotated channels.
        into: (B, T, kv_heads, group, dim) view of the buffer for rotated queries.
        key_slots: per layer (B, T, kv_heads, dim), the slots for new keys; if rows differ in
            length, (rows, capacity, kv_heads, dim), indexed by `rows` and `slots`.
        value_slots: as `key_slots`.
        rows: (B, 1) int64 or None.
        slots: (B, T) int64 or None.
        pieces: the nodes of each call of the attention kernel.
        queries: per piece (b, kv_heads, R, dim) view of the queries' buffer, R ≥ nodes · group.
        keys: per piece and layer (b, kv_heads, span, dim).
        values: as `keys`.
        masks: per piece and layer (b, 1, R, span) additive, or None.
        exact: see `open_frame`.
    """

    sign: Tensor
    cos: Tensor
    sin: Tensor
    half: int
    into: Tensor
    key_slots: list[Tensor]
    value_slots: list[Tensor]
    rows: Tensor | None
    slots: Tensor | None
    pieces: list[Piece]
    queries: list[Tensor]
    keys: list[list[Tensor]]
    values: list[list[Tensor]]
    masks: list[list[Tensor | None]]
    exact: bool


def open_frame(
    positions: Tensor,
    ancestors: Tensor | None,
    cache: KVCache,
    rows: Sequence[int],
    rotary: RotaryTable,
    sizes: Sizes,
    windows: Sequence[int | None],
    offset: int = 0,
    exact: bool = False,
    real: int | None = None,
) -> Frame:
    """Reserves the cache and prepares the shared data of one forward.

    Args:
        positions: (B, T) int64.
        ancestors: (B, T, offset + T) bool, or None for causal order.
        cache: the cache.
        rows: cache row of each batch row.
        rotary: the table, in the dtype of the weights.
        sizes: of the layers.
        windows: per layer, the sliding window or None.
        offset: uncommitted slots in use before the T new ones.
        exact: keep a node's bits independent of the rest of the forward, see `exact_pieces`.
        real: number of leading nodes that need attention; None for all T.

    Mutates: the capacity of `cache` if it is too small.
    """
    batch, width = positions.shape
    placement = place(cache, rows, width, offset, KEY_BLOCK if exact else 1)
    starts, group = placement.starts, sizes.group
    pieces = _pieces(placement, rows, ancestors, real or width, exact)
    padding = -(-3 // group) if exact else 0  # upper bound on a piece's dummy nodes
    masks = {
        window: _folded(attention_mask(placement, positions, ancestors, window, rotary.dtype), padding, group)
        for window in set(windows)
    }
    half, cos, sin = _angles(positions, rotary, placement.span, sizes.dim)
    make = cos.new_zeros if padding else cos.new_empty
    buffer = make(batch, width + padding, group, sizes.kv_heads, sizes.dim)
    key_slots, value_slots, row_index, slots = _new_slots(cache, placement.rows, rows, starts, width)
    windowed = [_queries_and_masks(piece, buffer, masks, group, exact) for piece in pieces]
    return Frame(
        sign=cos.new_tensor([[1.0], [-1.0]]),
        cos=cos,
        sin=sin,
        half=half,
        into=buffer[:, :width].transpose(2, 3),
        key_slots=key_slots,
        value_slots=value_slots,
        rows=row_index,
        slots=slots,
        pieces=pieces,
        queries=[queries for queries, _ in windowed],
        keys=[_read(cache.key_block, piece, rows) for piece in pieces],
        values=[_read(cache.value_block, piece, rows) for piece in pieces],
        masks=[[seen[window] for window in windows] for _, seen in windowed],
        exact=exact,
    )


def _folded(mask: Tensor | None, padding: int, group: int) -> Tensor | None:
    """Expands a mask (B, T, span) for folded query heads: (B, 1, (T + padding) · group, span)."""
    if mask is not None and mask.shape[1] + padding > 1:
        mask = torch.nn.functional.pad(mask, (0, 0, 0, padding)).repeat_interleave(group, dim=1)
    return None if mask is None else mask[:, None]


def _pieces(
    placement: Placement, rows: Sequence[int], ancestors: Tensor | None, width: int, exact: bool
) -> list[Piece]:
    """Returns exact pieces if requested and no node sees a later slot, else plain ones."""
    if exact and (ancestors is None or not _looks_ahead(ancestors, placement.starts, placement.offset)):
        return exact_pieces(rows, placement.starts, width)
    return plain_pieces(rows, placement.starts, width, placement.span if exact else 0)


def plain_pieces(rows: Sequence[int], starts: Sequence[int], width: int, span: int = 0) -> list[Piece]:
    """Returns one piece per run of consecutive cache rows, with a span of at least `span`."""
    breaks = [i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1]
    ranges = zip([0, *breaks], [*breaks, len(rows)], strict=True)
    return [Piece(b, e, 0, width, max(span, max(starts[b:e]) + width)) for b, e in ranges]


def exact_pieces(rows: Sequence[int], starts: Sequence[int], width: int) -> list[Piece]:
    """Returns pieces in which a node's span depends only on its own slot.

    The order of the attention kernel's sums varies only with the span (see `width_for_whole_blocks`
    for the one exception). So a node in slot s always reads the slots up to the next multiple of
    `KEY_BLOCK` after s, and a forward is split where its nodes cross such a multiple. We found this
    by comparing bits; `benchmarks/exactness.py` repeats the comparison, and a test enforces it.
    """
    pieces: list[Piece] = []
    previous: list[tuple[int, int, int]] = []
    for i, start in enumerate(starts):
        cuts, first = [], 0
        while first < width:
            span = ((start + first) // KEY_BLOCK + 1) * KEY_BLOCK
            last = min(width, span - start)
            cuts.append((first, last, span))
            first = last
        if i and cuts == previous and rows[i] == rows[i - 1] + 1:
            pieces[-len(cuts) :] = [piece._replace(end=i + 1) for piece in pieces[-len(cuts) :]]
        else:
            pieces += [Piece(i, i + 1, *cut) for cut in cuts]
        previous = cuts
    return pieces


def width_for_whole_blocks(width: int, group: int) -> int:
    """Returns the number of nodes to pass to the attention kernel so that `width` nodes are exact.

    The kernel splits the query rows of a key head, `width · group`, into blocks of 32. A block of
    fewer than four rows uses a kernel that rounds differently, so dummy nodes fill it up.
    """
    while 0 < width * group % 32 < 4:
        width += 1
    return width


def _looks_ahead(ancestors: Tensor, starts: Sequence[int], offset: int) -> bool:
    """True if a node sees a later slot that may belong to another piece."""
    width = ancestors.shape[1]
    if all(start // KEY_BLOCK == (start + width - 1) // KEY_BLOCK for start in starts):
        return False
    return bool(ancestors.triu(offset + 1).any())


def _queries_and_masks(
    piece: Piece, buffer: Tensor, masks: dict[int | None, Tensor | None], group: int, exact: bool
) -> tuple[Tensor, dict[int | None, Tensor | None]]:
    """Returns views of a piece's query rows and of their masks."""
    nodes = piece.last - piece.first
    end = piece.first + (width_for_whole_blocks(nodes, group) if exact else nodes)
    queries = buffer[piece.begin : piece.end, piece.first : end].flatten(1, 2).transpose(1, 2)
    part = (slice(piece.begin, piece.end), slice(None), slice(piece.first * group, end * group), slice(piece.span))
    return queries, {window: None if mask is None else mask[part] for window, mask in masks.items()}


def _new_slots(
    cache: KVCache, selector: slice | Tensor, rows: Sequence[int], starts: Sequence[int], width: int
) -> tuple[list[Tensor], list[Tensor], Tensor | None, Tensor | None]:
    """Returns a frame's `key_slots`, `value_slots`, `rows` and `slots`: the place of new keys and values."""
    keys, values = cache.key_block.transpose(2, 3), cache.value_block.transpose(2, 3)
    row_index = slots = None
    if isinstance(selector, slice) and min(starts) == max(starts):
        new = (slice(None), selector, slice(starts[0], starts[0] + width))
        keys, values = keys[new], values[new]
    else:
        row_index = torch.tensor(rows)[:, None]
        slots = torch.tensor(starts)[:, None] + torch.arange(width)
    return list(keys.unbind(0)), list(values.unbind(0)), row_index, slots


def _read(block: Tensor, piece: Piece, rows: Sequence[int]) -> list[Tensor]:
    first = rows[piece.begin]
    return list(block[:, first : first + piece.end - piece.begin, :, : piece.span].unbind(0))


def _angles(positions: Tensor, rotary: RotaryTable, span: int, dim: int) -> tuple[int, Tensor, Tensor]:
    cos, sin = rotary.at(positions, span)
    half = cos.shape[-1] // 2
    sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    if 2 * half < dim:
        cos = torch.nn.functional.pad(cos, (0, dim - 2 * half), value=1.0)
        sin = torch.nn.functional.pad(sin, (0, dim - 2 * half))
    return half, cos[:, :, None, None], sin[:, :, None, None]
