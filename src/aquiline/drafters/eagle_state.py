"""Keeps what an EAGLE drafter knows of each slot, and limits how far back its network sees.

A network that was trained on short texts drafts worse at distances that it never saw, and each position that it sees
costs time. Under a window the oldest positions leave its cache; the others move to the front, and their keys rotate
back by as many positions, so that a position in the cache is where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aquiline.cache import KVCache, copy_prefix, truncate
from aquiline.targets.rope import RopeConfig, inverse_frequencies, rotate


@dataclass(eq=False)
class EagleState:
    """The state of an `EagleDrafter`.

    Attributes:
        cache: the head's keys and values, computed from the target's features alone.
        hidden: (slots, H) feedback at the last ingested position.
        logits: (slots, Vd) draft logits at that position.
        pending: per slot, chunks not yet forwarded (n tokens, features (1, n, F)).
        forgotten: per slot, positions before those in the cache.
    """

    cache: KVCache
    hidden: Tensor
    logits: Tensor
    pending: list[list[tuple[Sequence[int], Tensor]]] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)


def padded(pending: Sequence[Sequence[tuple[Sequence[int], Tensor]]]) -> tuple[list[Sequence[int]], Tensor]:
    """Joins each slot's chunks: B rows of tokens, and (B, T, F) padded features."""
    tokens: list[Sequence[int]] = [
        chunks[0][0] if len(chunks) == 1 else [token for ids, _ in chunks for token in ids] for chunks in pending
    ]
    features = [torch.cat([f for _, f in chunks], 1) if len(chunks) > 1 else chunks[0][1] for chunks in pending]
    return tokens, features[0] if len(pending) == 1 else pad_sequence([f[0] for f in features], batch_first=True)


def copy_slot(state: EagleState, source: int, slot: int, length: int) -> None:
    """Copies what is known of the first `length` positions of slot `source`, which has none pending."""
    kept = max(length - state.forgotten[source], 0)
    copy_prefix(state.cache, source, slot, kept)
    state.forgotten[slot] = length - kept


def keep(state: EagleState, slot: int, length: int) -> None:
    """Discards all but the first `length` positions of a slot, which has none pending."""
    state.forgotten[slot] = min(state.forgotten[slot], length)
    truncate(state.cache, slot, min(length - state.forgotten[slot], int(state.cache.lengths[slot])))


def forget(state: EagleState, slot: int, window: int, rope: RopeConfig) -> None:
    """Forgets all but a slot's last `window` positions as soon as it has more than twice as many.

    The values of layers above the first still contain what they saw.

    Args:
        window: positions to keep, ≥ 1.
        rope: of the network.

    Mutates: `state`.
    """
    pending, held = state.pending[slot], int(state.cache.lengths[slot])
    waiting = sum(len(tokens) for tokens, _ in pending)
    if held + waiting <= 2 * window:
        return
    left = held + waiting - window
    state.forgotten[slot] += left
    _drop(state.cache, slot, min(held, left), rope)
    left -= min(held, left)
    while left:
        tokens, features = pending.pop(0)
        if len(tokens) > left:
            pending.insert(0, (tokens[left:], features[:, left:]))
        left -= min(left, len(tokens))


def _drop(cache: KVCache, slot: int, count: int, rope: RopeConfig) -> None:
    """Drops the first `count` positions of a row."""
    size = int(cache.lengths[slot])
    if 0 < count < size:
        angles = (count * inverse_frequencies(rope)[0].double()).repeat(2)
        keys, values = cache.key_block[:, slot, :, count:size], cache.value_block[:, slot, :, count:size]
        wide = torch.promote_types(keys.dtype, torch.float32)
        cos, sin = angles.cos().to(keys.device, wide), angles.sin().to(keys.device, wide)
        cache.key_block[:, slot, :, : size - count] = rotate(keys.to(wide), cos, -sin).to(keys.dtype)
        cache.value_block[:, slot, :, : size - count] = values.clone()
    truncate(cache, slot, size - count)
