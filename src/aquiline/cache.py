"""The key/value cache: slots that requests occupy, and the commit of accepted tree nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BUCKET = 64
"""Capacities are multiples of this, so that a growing context reallocates rarely."""

SCRATCH = 1024
"""Slots beyond the last position of a model, where the nodes of a tree may lie until the commit."""

MOST_NODES = SCRATCH - _BUCKET
"""Nodes of a tree, its root included, that fit there for every target; some read whole buckets of slots."""


@dataclass(eq=False)
class KVCache:
    """Keys and values of all layers for a number of rows.

    Slots at or beyond ``lengths[row]`` hold garbage. All positions are kept; sliding windows
    are masks. Layers share one allocation so that `commit` moves all of them in one copy;
    ``keys[layer]`` is a view.

    Attributes:
        key_block: (layers, rows, kv_heads, capacity, key_dim).
        value_block: (layers, rows, kv_heads, capacity, value_dim).
        lengths: (rows,) int64 on the CPU, committed tokens of each row.
        max_capacity: positions that the model can take; `reserve` refuses more than that and `SCRATCH`.
    """

    key_block: Tensor
    value_block: Tensor
    lengths: Tensor
    max_capacity: int

    @property
    def rows(self) -> int:
        """Number of row slots."""
        return self.key_block.shape[1]

    @property
    def capacity(self) -> int:
        """Positions that each row has room for now."""
        return self.key_block.shape[3]

    def keys(self, layer: int) -> Tensor:
        """(rows, kv_heads, capacity, key_dim) view of one layer."""
        return self.key_block[layer]

    def values(self, layer: int) -> Tensor:
        """(rows, kv_heads, capacity, value_dim) view of one layer."""
        return self.value_block[layer]

    def reserve(self, positions: int) -> None:
        """Makes room for `positions` positions in every row; keeps the content.

        Mutates: the blocks (a copy into larger ones when they are too small).

        Raises:
            ValueError: if `positions` exceeds `max_capacity`.
        """
        if positions <= self.capacity:
            return
        if positions > self.max_capacity + SCRATCH:
            raise ValueError(
                f"{positions} positions do not fit: the context of this model is {self.max_capacity}, and a tree "
                f"may take {SCRATCH} more; shorten the prompt, lower max_new_tokens, or draft smaller trees"
            )
        # An eighth of head room: growing by one bucket a time would copy the cache over and over.
        wanted = max(positions, self.capacity + self.capacity // 8)
        size = min(-(-wanted // _BUCKET) * _BUCKET, max(self.max_capacity + SCRATCH, positions))
        self.key_block = _grown(self.key_block, size)
        self.value_block = _grown(self.value_block, size)


def check_fits(what: str, nodes: int, remedy: str) -> None:
    """Refuses drafts that would not fit at the end of a context, before any text is generated.

    Args:
        what: what drafts them, in words.
        nodes: how many slots its drafts take in a row, the root's included.
        remedy: what to do.

    Raises:
        ValueError: if that is more than `MOST_NODES`.
    """
    if nodes > MOST_NODES:
        raise ValueError(
            f"{what} takes {nodes} slots of the cache; allowed: at most {MOST_NODES}, which fit also at the end of a "
            f"context; {remedy}"
        )


def _grown(block: Tensor, capacity: int) -> Tensor:
    layers, rows, heads, used, dim = block.shape
    # Zeros, not empty: a masked slot still meets a weight of 0, and 0 · NaN is NaN.
    larger = block.new_zeros(layers, rows, heads, capacity, dim)
    larger[:, :, :, :used] = block
    return larger


def new_cache(
    *,
    layers: int,
    rows: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int | None = None,
    capacity: int,
    max_capacity: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> KVCache:
    """Allocates an empty cache; `capacity` is rounded up to a bucket."""
    size = min(-(-max(capacity, 1) // _BUCKET) * _BUCKET, max_capacity + SCRATCH)
    shape = (layers, rows, kv_heads, size)
    return KVCache(
        key_block=torch.zeros(*shape, key_dim, dtype=dtype, device=device),
        value_block=torch.zeros(*shape, value_dim or key_dim, dtype=dtype, device=device),
        lengths=torch.zeros(rows, dtype=torch.int64),
        max_capacity=max_capacity,
    )


def commit(cache: KVCache, path: Tensor, rows: Sequence[int]) -> None:
    """Keeps the accepted nodes of the last forward and forgets the others.

    The forward wrote node i of row b into slot ``lengths[b] + i``. The nodes on the accepted
    path are gathered to the front, in path order, and the length advances by their number.
    A prefix (0, 1, 2, …), which is what chains and prefill commit, copies nothing.

    Args:
        cache: the cache that the forward wrote into.
        path: (B, A) int64 node indices in increasing order, root first, padded with -1.
        rows: the B rows that the forward worked on.

    Mutates: `cache` content and lengths.
    """
    for row, nodes in zip(rows, path.tolist(), strict=True):
        kept = [node for node in nodes if node >= 0]
        start = int(cache.lengths[row])
        first_moved = next((i for i, node in enumerate(kept) if node != i), len(kept))
        if first_moved < len(kept):
            source = torch.tensor(kept[first_moved:], device=cache.key_block.device) + start
            target = slice(start + first_moved, start + len(kept))
            for block in (cache.key_block, cache.value_block):
                block[:, row, :, target] = block[:, row].index_select(2, source)
        cache.lengths[row] = start + len(kept)


def truncate(cache: KVCache, row: int, length: int) -> None:
    """Forgets all but the first `length` positions of a row (0 frees the row)."""
    assert 0 <= length <= int(cache.lengths[row]), "a cache can only be cut to less than it holds"
    cache.lengths[row] = length


def copy_prefix(cache: KVCache, source: int, target: int, length: int) -> None:
    """Copies the first `length` positions of row `source` to row `target` (shared prompts)."""
    assert length <= int(cache.lengths[source])
    for block in (cache.key_block, cache.value_block):
        block[:, target, :, :length] = block[:, source, :, :length]
    cache.lengths[target] = length
