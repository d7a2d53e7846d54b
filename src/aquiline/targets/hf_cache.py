"""Presents our cache through the cache interface of transformers.

Imports transformers, so it is itself imported only where a transformers model already exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from aquiline.cache import KVCache
from aquiline.targets.attention import Placement, read, write
from aquiline.tree import select


@dataclass(frozen=True)
class LayerSlot:
    """Place of one model layer's keys and values in a `KVCache`.

    The cache is one block for all layers of a device, as wide as the widest layer; a narrower layer uses
    the first heads and dimensions.

    Attributes:
        index: layer among those of the device.
    """

    device: torch.device
    index: int
    heads: int
    key_dim: int
    value_dim: int


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's share of a forward: writes at the placed slots, returns views up to the span."""

    is_sliding = False  # All positions are kept; a window is a mask.

    def __init__(self, cache: KVCache, placement: Placement, slot: LayerSlot | None) -> None:
        super().__init__()
        self._cache, self._placement, self._slot = cache, placement, slot

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        slot, cache, placement = self._slot, self._cache, self._placement
        assert slot is not None, "a layer without keys in the probe wrote some"
        if key_states.device != cache.key_block.device:
            cache = next(part for part in cache.parts if part.key_block.device == key_states.device)
            placement = replace(placement, rows=select(key_states.device, placement.slots))
        narrow = (slot.heads, slot.key_dim, slot.value_dim)
        if narrow == (cache.key_block.shape[2], cache.key_block.shape[4], cache.value_block.shape[4]):
            view, layer = cache, slot.index
        else:
            view, layer = _narrowed(cache, slot), 0
        write(view, layer, placement, key_states, value_states)
        return read(view, layer, placement)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the cache is already allocated."""

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self._placement.span, 0

    def get_seq_length(self) -> int:
        return self._placement.span - self._placement.width

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` in transformers 5.0."""
        return -1


def _narrowed(cache: KVCache, slot: LayerSlot) -> KVCache:
    """Returns one layer of `cache` as a separate cache that shares its memory."""
    return KVCache(
        key_block=cache.key_block[slot.index : slot.index + 1, :, : slot.heads, :, : slot.key_dim],
        value_block=cache.value_block[slot.index : slot.index + 1, :, : slot.heads, :, : slot.value_dim],
        lengths=cache.lengths,
        max_capacity=cache.max_capacity,
    )


def bridge(cache: KVCache, placement: Placement, slots: Mapping[int, LayerSlot], layers: int) -> Cache:
    """Returns a transformers cache for one forward, backed by `cache`.

    Args:
        cache: written at `placement`; its lengths are not advanced.
        slots: model layer → its slot; layers that reuse the keys of others are absent.
    """
    return Cache(layers=[_SlotLayer(cache, placement, slots.get(i)) for i in range(layers)])


def recording_cache() -> DynamicCache:
    """Returns an empty transformers cache, to record what a model writes into it."""
    return DynamicCache()


def recorded_slots(cache: DynamicCache) -> dict[int, LayerSlot]:
    """Returns a slot for each layer that wrote into `cache`, in layer order."""
    slots: dict[int, LayerSlot] = {}
    for i, layer in enumerate(cache.layers):
        if layer.keys is not None:
            device = layer.keys.device
            index = sum(slot.device == device for slot in slots.values())
            slots[i] = LayerSlot(device, index, layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
    return slots


def unsupported_layers(config: Any) -> list[str]:
    """Names the types of this model's transformers cache layers that hold more than keys and values."""
    plain = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
    kinds = [type(layer).__name__ for layer in DynamicCache(config=config).layers]
    return sorted(set(kinds) - set(plain))
