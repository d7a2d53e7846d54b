"""Target features of conversations: computed without a cache, or read from a folder.

A conversation's features are always computed alone, so that they do not depend on what was
batched with it, and a run with a feature folder has the same bits as one without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aquiline.targets.decoder import Decoder
from aquiline.targets.layers import DecoderLayer, decoder_layers
from aquiline.targets.target import Feature, Target, TargetInput
from aquiline.training.data.dataset import TrainingSet
from aquiline.training.feature_folder import FeatureStore, announce_room, feature_stamp, open_features
from aquiline.training.learners.learner import Example, Learner
from aquiline.training.processes import gathered, largest
from aquiline.training.settings import TrainSettings


@torch.no_grad()
def compute_features(target: Target, tokens: Tensor, features: Sequence[Feature]) -> Tensor:
    """Runs the target over one conversation.

    Args:
        target: the frozen target.
        tokens: (T,) int64.
        features: which features, concatenated on the last axis.

    Returns:
        (T, F) in the target's dtype.
    """
    if isinstance(target, Decoder):
        return decoder_features(target, [tokens], features)[0]
    positions = torch.arange(len(tokens), device=tokens.device)[None]
    nothing = torch.zeros(1, 0, dtype=torch.int64, device=tokens.device)
    cache = target.new_cache(1, len(tokens))
    out = target.forward(TargetInput(tokens[None], positions, None, cache, [0], features, nothing))
    assert out.features is not None
    return out.features[0]


Apply = Callable[[Callable[["_Stream"], None], Sequence["_Stream"]], Iterable[None]]
"""Calls a function with each of some streams: `map`, or that of a pool of workers."""


@dataclass(eq=False)
class _Stream:
    """A conversation between two layers: hidden (1, T, H), cos and sin, and the features taken so far."""

    hidden: Tensor
    cos: Tensor
    sin: Tensor
    taken: dict[Feature, Tensor] = field(default_factory=dict)


@torch.no_grad()
def decoder_features(
    target: Decoder, texts: Sequence[Tensor], features: Sequence[Feature], apply: Apply = map
) -> list[Tensor]:
    """Runs conversations through our decoder layer by layer, each on its own.

    Without the cache: fused causal attention, no logits. Processes that share a target call this
    together, with as many conversations as each has.

    Args:
        target: the decoder.
        texts: (T,) int64 each.
        features: as in `compute_features`.
        apply: runs the conversations through a layer.

    Returns:
        (T, F) for each conversation.
    """
    streams = []
    for tokens in texts:
        positions = torch.arange(len(tokens), device=tokens.device)[None]
        streams.append(_Stream(target.embed_tokens(tokens[None]), *target.rotary(positions, len(tokens))))
    for i, _ in enumerate(gathered(list(target.layers))):
        for _ in apply(partial(_advance, target, i, i in features), streams):
            pass
    for stream in streams:
        stream.taken[target.config.num_layers] = stream.hidden
        if "final" in features:
            stream.taken["final"] = target.norm(stream.hidden)
    return [torch.cat([stream.taken[f] for f in features], dim=-1)[0] for stream in streams]


@torch.no_grad()
def _advance(target: Decoder, i: int, take: bool, stream: _Stream) -> None:
    if take:
        stream.taken[i] = stream.hidden
    rotation = (stream.cos, stream.sin) if target.config.rotary[i] else None
    stream.hidden = through_layer(decoder_layers(target.layers)[i], stream.hidden, rotation, target.config.windows[i])


def through_layer(
    layer: DecoderLayer, hidden: Tensor, rotation: tuple[Tensor, Tensor] | None, window: int | None = None
) -> Tensor:
    """Takes a whole conversation through a decoder layer, causally and without a cache.

    Args:
        layer: the layer.
        hidden: (1, T, H).
        rotation: cos and sin (1, T, dim) of the positions; None for a layer without rotary positions.
        window: positions that each one sees, itself included; None for all before it.

    Returns:
        (1, T, H).
    """
    attention, width = layer.self_attn, hidden.shape[1]
    q, k, v = attention.qkv(layer.input_layernorm(hidden), *(rotation or (None, None)))
    seen = None
    if window is not None and window < width:
        seen = torch.ones(width, width, dtype=torch.bool, device=hidden.device).tril().triu(1 - window)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, seen, is_causal=seen is None, scale=attention.scale
    )
    return layer.finish(hidden, mixed.transpose(1, 2).reshape(1, width, -1))


def conversation_key(source: int, index: int) -> str:
    """Name of a conversation's features in the folder."""
    return f"{source}.{index}"


@dataclass(frozen=True, eq=False)
class FeatureSource:
    """Computes or reads the features of a run's conversations.

    Attributes:
        target: frozen.
        layout: features that are computed, and stored, for each conversation.
        read: those of them that the head reads.
        store: folder that keeps them, or None.
        noise: see the setting `feature_noise`.
        seed: of the noise.
    """

    target: Target
    layout: tuple[Feature, ...]
    read: tuple[Feature, ...]
    store: FeatureStore | None
    noise: float
    seed: int

    def keep(self, key: str, rows: Tensor) -> None:
        """Stores features, if there is a folder."""
        if self.store:
            self.store.put(key, rows.cpu())


def open_source(
    settings: TrainSettings, target: Target, learner: Learner, sets: Sequence[TrainingSet]
) -> FeatureSource:
    """Opens the features of a run, and their folder if the settings name one.

    Raises:
        ValueError: for a folder of another target or other data, and for a disk without room.
    """
    layout: tuple[Feature, ...] = tuple(dict.fromkeys((*learner.features, *settings.keep_layers, "final")))
    store: FeatureStore | None = None
    if settings.features is not None:
        fingerprints = {str(i): s.fingerprint for i, s in enumerate(sets)}
        stamp = feature_stamp(learner.fingerprint, layout, fingerprints, settings.max_length)
        store = open_features(settings.features, stamp)
        layout = store.layout
        size = len(layout) * target.shape.hidden_size * target.dtype.itemsize
        announce_room(store, positions_to_keep(sets, settings) * size)
    return FeatureSource(target, layout, learner.features, store, settings.feature_noise, settings.seed)


def positions_to_keep(sets: Sequence[TrainingSet], settings: TrainSettings) -> int:
    """Upper bound on the positions whose features a run stores: those of its sets, or of its length."""
    limits = settings.limit_conversations or (0,) * len(sets)
    lengths = [data.lengths.clip(max=settings.max_length) for data in sets]
    there = sum(int(np.sort(part)[-limit:].sum()) for part, limit in zip(lengths, limits, strict=True))
    return min(there, settings.total_positions + settings.batch_positions + settings.max_length)


def features_ahead(
    source: FeatureSource, texts: dict[str, Tensor], positions: int, accelerator: Any, apply: Apply
) -> dict[str, Tensor]:
    """Features of this process's conversations where the target is spread: all processes compute in step.

    Args:
        source: where they come from.
        texts: conversation key → (T,) int64 tokens.
        positions: bound on what our own decoder takes through its layers together.
        accelerator: knows the processes.
        apply: see `decoder_features`.
    """
    unknown = {key: tokens for key, tokens in texts.items() if not source.store or key not in source.store}
    parts = _parts(unknown, positions if isinstance(source.target, Decoder) else 0)
    found: dict[str, Tensor] = {}
    (turns,) = largest(accelerator, len(parts))
    for turn in range(turns):
        part = parts[turn] if turn < len(parts) else []
        if isinstance(source.target, Decoder):
            rows = decoder_features(source.target, [unknown[key] for key in part], source.layout, apply)
        else:  # the others' layers are not gathered without this process: it computes even where it has nothing left
            nothing = torch.zeros(1, dtype=torch.int64, device=source.target.device)
            computed = compute_features(source.target, unknown[part[0]] if part else nothing, source.layout)
            rows = [computed] if part else []
        found.update(zip(part, rows, strict=True))
    for key, row in found.items():
        source.keep(key, row)
    return found


def _parts(texts: dict[str, Tensor], positions: int) -> list[list[str]]:
    """Splits conversations into groups of at most `positions` positions, or of one conversation."""
    parts: list[list[str]] = []
    room = 0
    for key, tokens in texts.items():
        if not parts or len(tokens) > room:
            parts.append([])
            room = positions
        parts[-1].append(key)
        room -= len(tokens)
    return parts


def add_features(
    source: FeatureSource, key: str, tokens: Tensor, mask: Tensor, *, step: int, ahead: dict[str, Tensor]
) -> Example:
    """Adds the features to a conversation, from `ahead` or the folder where they are known.

    Args:
        source: where they come from.
        key: of the conversation.
        tokens: (T,) int64.
        mask: (T,) bool, the token is the assistant's.
        step: optimiser step, which decides the noise.
        ahead: features that were computed before.
    """
    rows = ahead.get(key)
    if rows is None and source.store:
        rows = source.store.get(key)
    if rows is None:
        rows = compute_features(source.target, tokens, source.layout)
        source.keep(key, rows)
    rows = rows.to(source.target.device)
    split = torch.split(rows, source.target.shape.hidden_size, dim=-1)
    parts = dict(zip(source.layout, split, strict=True))
    features = torch.cat([parts[f] for f in source.read], dim=-1)
    if source.noise:
        features = features + source.noise * _noise(f"{source.seed} {step} {key}", features)
    return Example(tokens, mask, features, parts["final"])


def _noise(name: str, like: Tensor) -> Tensor:
    """U(-1, 1), decided by a name: the same after a resume."""
    digest = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (torch.rand(like.shape, generator=generator) * 2 - 1).to(like)
