"""The key/value cache: slots that requests occupy, and the commit of accepted tree nodes."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BUCKET = 64
"""Capacities are multiples of this, so that a growing context reallocates rarely."""

SCRATCH = 1024
"""Slots beyond the model's last position, for tree nodes that are not committed yet."""

MOST_NODES = SCRATCH - _BUCKET
"""Largest tree, root included, that fits into the scratch slots of every target; some targets read whole buckets."""


@dataclass(eq=False)
class KVCache:
    """Keys and values of all layers for a fixed number of rows.

    Slots at or beyond ``lengths[row]`` hold garbage. All positions are kept; sliding windows
    are masks. Layers share one allocation so that `commit` moves all of them in one copy;
    ``keys(layer)`` is a view.

    Attributes:
        key_block: (layers, rows, kv_heads, capacity, key_dim).
        value_block: (layers, rows, kv_heads, capacity, value_dim).
        lengths: (rows,) int64 on the CPU, committed tokens of each row.
        max_capacity: the model's context length; `reserve` rejects more than this plus `SCRATCH`.
        parts: of a model spread over devices, the layers on each other device; they share `lengths`.
    """

    key_block: Tensor
    value_block: Tensor
    lengths: Tensor
    max_capacity: int
    parts: tuple[KVCache, ...] = ()

    def __post_init__(self) -> None:
        # Kept, so that torch.compile sees each layer as an input and writes into it; the views of one input are copied.
        blocks = self.key_block, self.value_block
        self._layers = [[block[layer] for layer in range(len(block))] for block in blocks]
        self._numbers = self.lengths.numpy()

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.key_block.shape[1]

    @property
    def capacity(self) -> int:
        """Positions allocated per row."""
        return self.key_block.shape[3]

    @property
    def blocks(self) -> list[Tensor]:
        """The blocks of all devices."""
        return [block for part in (self, *self.parts) for block in (part.key_block, part.value_block)]

    def keys(self, layer: int) -> Tensor:
        """(rows, kv_heads, capacity, key_dim) view of one layer."""
        return self._layers[0][layer]

    def values(self, layer: int) -> Tensor:
        """(rows, kv_heads, capacity, value_dim) view of one layer."""
        return self._layers[1][layer]

    def set_length(self, row: int, length: int) -> None:
        """Sets a row's length, in a tenth of the time that an assignment to `lengths` takes after a forward."""
        self._numbers[row] = length

    def reserve(self, positions: int) -> None:
        """Makes room for `positions` positions in every row; keeps the content.

        Mutates: copies the blocks into larger ones if they are too small.

        Raises:
            ValueError: if `positions` exceeds `max_capacity + SCRATCH`.
        """
        if positions <= self.capacity:
            return
        if positions > self.max_capacity + SCRATCH:
            raise ValueError(
                f"{positions} positions do not fit: this model's context is {self.max_capacity}, plus {SCRATCH} for a "
                "tree; shorten the prompt, lower max_new_tokens, or draft smaller trees"
            )
        # Grow by an eighth: growing bucket by bucket would copy the cache again and again.
        wanted = max(positions, self.capacity + self.capacity // 8)
        size = min(-(-wanted // _BUCKET) * _BUCKET, max(self.max_capacity + SCRATCH, positions))
        self.key_block = self._grown(self.key_block, size)
        self.value_block = self._grown(self.value_block, size)
        self.__post_init__()
        for part in self.parts:
            part.reserve(positions)

    def _grown(self, block: Tensor, capacity: int) -> Tensor:
        layers, rows, heads, used, dim = block.shape
        larger = _zeros((layers, rows, heads, capacity, dim), block.dtype, block.device)
        for row, length in enumerate(self.lengths.tolist()):
            kept = min(used, length + SCRATCH)  # a drafter's levels lie behind what is committed
            part = block[:, row, :, :kept]
            if length or block.device.type != "cpu" or part.any():  # zeros are there, and take no memory
                larger[:, row, :, :kept] = part
        return larger


def check_fits(what: str, nodes: int, remedy: str) -> None:
    """Rejects drafts that would not fit at the end of a context, before generation starts.

    Args:
        what: name of the draft in the error message.
        nodes: slots that the draft occupies in a row, root included.
        remedy: suggestion that ends the message.

    Raises:
        ValueError: if `nodes` exceeds `MOST_NODES`.
    """
    if nodes > MOST_NODES:
        raise ValueError(
            f"{what} takes {nodes} cache slots; allowed: at most {MOST_NODES}, which fit even at the end of a context; "
            f"{remedy}"
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Returns zeros that take memory of the CPU only where they are written: rows that nobody uses take none.

    Zeros rather than empty: masked slots are still multiplied by a weight of 0, and 0 · NaN is NaN.
    """
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or not size or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes of keys and values: {error}") from error
    return torch.frombuffer(pages, dtype=dtype).view(shape)


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
        key_block=_zeros((*shape, key_dim), dtype, device),
        value_block=_zeros((*shape, value_dim or key_dim), dtype, device),
        lengths=torch.zeros(rows, dtype=torch.int64),
        max_capacity=max_capacity,
    )


def commit(
    cache: KVCache, path: Tensor | Sequence[Sequence[int]], rows: Sequence[int], moved: Tensor | None = None
) -> None:
    """Keeps the accepted nodes of the last forward and discards the rest.

    The forward wrote node i of row b into slot ``lengths[b] + i``. The nodes on the accepted
    path move to the front, in path order, and the length advances by their number. A prefix
    (0, 1, 2, …), as committed by chains and prefill, copies nothing.

    Args:
        cache: the cache that the forward wrote into.
        path: per row, node indices in increasing order, root first; as a tensor (B, A) int64 on the CPU, padded
            with -1.
        rows: the B rows of the forward.
        moved: the padded `path` on the cache's device, where it is there already.

    Mutates: content and lengths of `cache`.
    """
    paths = [[node for node in nodes if node >= 0] for nodes in path.tolist()] if isinstance(path, Tensor) else path
    lengths = cache.lengths.tolist()
    for i, (row, kept) in enumerate(zip(rows, paths, strict=True)):
        start, size = lengths[row], len(kept)
        if size and kept[-1] != size - 1:
            first_moved = next(place for place, node in enumerate(kept) if node != place)
            if moved is None:
                source = torch.tensor(kept[first_moved:], device=cache.key_block.device) + start
            else:
                source = moved[i, first_moved:size] + start
            target = slice(start + first_moved, start + size)
            for block in cache.blocks:
                block[:, row, :, target] = block[:, row].index_select(2, source.to(block.device))
        cache.set_length(row, start + size)


def truncate(cache: KVCache, row: int, length: int) -> None:
    """Discards all but the first `length` positions of a row (0 frees the row)."""
    assert 0 <= length <= int(cache.lengths[row]), "a cache cannot be truncated to more than it holds"
    cache.set_length(row, length)


def copy_prefix(cache: KVCache, source: int, target: int, length: int) -> None:
    """Copies the first `length` positions of row `source` to row `target` (shared prompts)."""
    assert length <= int(cache.lengths[source]), "a copy cannot be longer than its source"
    for block in cache.blocks:
        block[:, target, :, :length] = block[:, source, :, :length]
    cache.set_length(target, length)
