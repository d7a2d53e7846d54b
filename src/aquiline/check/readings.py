"""Readings of an EAGLE head: as its files say, and under the usual mistakes, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.checkpoints.eagle.gguf import interleaved
from aquiline.checkpoints.eagle.stored import StoredHead
from aquiline.models.tokenizer import token_table
from aquiline.targets.target import Feature, Target, TargetShape, eagle3_layers

ROPE_BASES = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0, 5_000_000.0)
"""Bases of common models, and the default of the reference implementation."""


@dataclass(frozen=True, eq=False)
class Reading:
    """One way to read a head.

    Attributes:
        name: what it assumes, as a clause.
        remedy: the setting or tensor that makes every engine read the head this way.
        stored: configuration and tensors.
        features: target features that its fusing linear reads, in order.
        lag: positions by which features come late.
        label: positions by which the head predicts another token than an engine takes: -1 repeats the token that it
            was given, 1 skips one.
    """

    name: str
    remedy: str
    stored: StoredHead
    features: tuple[Feature, ...]
    lag: int = 0
    label: int = 0


def as_stored(stored: StoredHead) -> Reading:
    """The reading that the engine drafts with."""
    return Reading("as its files say", "", stored, stored.config.features)


def usual_mistakes(
    stored: StoredHead, target: Target, head: Path, folder: Path | None, theta: float | None
) -> list[Reading]:
    """Other readings, each undoing one mistake.

    Args:
        stored: the head.
        target: the target.
        head: folder or file of the head, which may hold a tokenizer.
        folder: of the target.
        theta: rotary base of the target, where it is known.
    """
    base = as_stored(stored)
    found = [
        *_layers(base, target.shape),
        *_shifts(base),
        *_vocabulary(base, target.shape),
        *_tokenizer(base, target.shape, head, folder),
        *_switches(base),
        *_ropes(base, theta),
        *_permuted(base),
    ]
    if stored.embedding is not None and stored.config.hidden_size == stored.config.target_hidden_size:
        remedy = "remove embed_tokens.weight from the head's file: it is another target's"
        found.append(
            replace(base, name="the target's embedding", remedy=remedy, stored=replace(stored, embedding=None))
        )
    return found


def features_of(readings: list[Reading]) -> tuple[Feature, ...]:
    """All features that some readings need, and the one that the LM head reads."""
    return tuple(dict.fromkeys(feature for reading in readings for feature in (*reading.features, "final")))


def _layers(base: Reading, shape: TargetShape) -> Iterator[Reading]:
    """Neighbouring layers; the order reversed; the default; EAGLE-1/2's feature before the final norm."""
    if base.stored.config.kind == "eagle":
        remedy = "train the head on states after the final norm; engines give no others to EAGLE-1/2 heads"
        yield replace(base, name="features before the final norm", remedy=remedy, features=(shape.num_layers,))
        return
    numbers = tuple(int(feature) for feature in base.features)
    options: dict[tuple[Feature, ...], str] = {}
    for step, words in (
        (1, "one layer higher (ids named as outputs)"),
        (-1, "one layer lower (ids named as boundaries)"),
    ):
        options[tuple(number + step for number in numbers)] = f"features {words}"
    options[numbers[::-1]] = "features in reverse order"
    if shape.num_layers >= 7:
        options.setdefault(eagle3_layers(shape.num_layers), "features of the default layers")
    for features, name in options.items():
        if features != numbers and all(0 <= int(f) <= shape.num_layers for f in features):
            remedy = f'write "eagle_aux_hidden_state_layer_ids": {list(features)} at the top level of config.json'
            yield replace(base, name=name, remedy=remedy, features=features)


def _shifts(base: Reading) -> Iterator[Reading]:
    remedy = "train again: tokens and labels must be shifted against the features, see `aquiline train`"
    yield replace(base, name="labels one token early (it repeats the token it is given)", remedy=remedy, label=-1)
    yield replace(base, name="labels one token late", remedy=remedy, label=1)
    yield replace(base, name="features one position late", remedy=remedy, lag=1)


def _vocabulary(base: Reading, shape: TargetShape) -> Iterator[Reading]:
    ids = base.stored.draft_to_target
    if ids is None:
        return
    draft = torch.arange(len(ids))
    options = {
        "d2t as absolute ids": (ids - draft, "write d2t as offsets (target id − draft id), and t2d with it"),
        "d2t as offsets": (ids + draft, "write d2t as offsets (target id − draft id): the file's hold them twice"),
        "drafted ids one lower": (ids - 1, "subtract 1 from d2t: a token was added in front of the tokenizer's"),
        "drafted ids one higher": (ids + 1, "add 1 to d2t: a token was removed from the front of the tokenizer's"),
    }
    for name, (changed, remedy) in options.items():
        if int(changed.min()) >= 0 and int(changed.max()) < shape.vocab_size:
            yield replace(base, name=name, remedy=remedy, stored=replace(base.stored, draft_to_target=changed))


def _tokenizer(base: Reading, shape: TargetShape, head: Path, folder: Path | None) -> Iterator[Reading]:
    """Ids translated from the tokenizer in the head's folder to the target's."""
    moved = moved_tokens(head, folder)
    if not moved:
        return
    there = torch.arange(shape.vocab_size)
    for own, target_id in moved.items():
        if own < shape.vocab_size and target_id < shape.vocab_size:
            there[own] = target_id
    stored, table = base.stored, base.stored.embedding
    ids = torch.arange(shape.vocab_size) if stored.draft_to_target is None else stored.draft_to_target
    mapping = None if stored.config.kind == "eagle" else there[ids]
    if table is not None:
        table = table.clone().index_copy_(0, there, table) if len(set(there.tolist())) == len(there) else table
    remedy = "translate d2t, t2d and the embedding from the head's tokenizer to the target's, or use its own target"
    changed = replace(stored, draft_to_target=mapping, embedding=table)
    yield replace(base, name="ids of the tokenizer in the head's folder", remedy=remedy, stored=changed)


def moved_tokens(head: Path, folder: Path | None) -> dict[int, int]:
    """Id in the head's own tokenizer → the target's id of the same token, where they differ."""
    if folder is None or not (head / "tokenizer.json").is_file():
        return {}
    mine, theirs = token_table(head), token_table(folder)
    if mine is None or theirs is None:
        return {}
    ids = {token: i for i, token in theirs.items()}
    return {i: ids[token] for i, token in mine.items() if min(i, ids.get(token, i)) >= 0 and ids.get(token, i) != i}


def _switches(base: Reading) -> Iterator[Reading]:
    config = base.stored.config
    if config.kind == "eagle":
        return
    for flag, on, off in (
        ("norm_before_residual", "the residual is the normed feature", "the residual is the feature itself"),
        ("norm_output", "the feedback is normed", "the feedback is not normed"),
    ):
        now = bool(getattr(config, flag))
        remedy = f'write "{flag}": {str(not now).lower()} in config.json'
        changes: dict[str, Any] = {flag: not now}
        changed = replace(config, **changes)
        yield replace(base, name=off if now else on, remedy=remedy, stored=replace(base.stored, config=changed))


def _ropes(base: Reading, theta: float | None) -> Iterator[Reading]:
    """The target's base, if the files say another; else all common ones. Answers hardly tell wrong bases apart."""
    config = base.stored.config
    rope = config.layer.rope
    for value in ROPE_BASES if theta in (None, rope.theta) else (theta,):
        if value != rope.theta:
            layer = replace(config.layer, rope=replace(rope, theta=value))
            remedy = f'write "rope_theta": {value:g} in config.json'
            changed = replace(base.stored, config=replace(config, layer=layer))
            yield replace(base, name=f"rotary base {value:g}", remedy=remedy, stored=changed)


def _permuted(base: Reading) -> Iterator[Reading]:
    remedy = "reorder the rows of q_proj and k_proj in each head: {}"
    orders = (
        ("q and k stored as pairs", _from_pairs, "from pairs (x₀ y₀ x₁ y₁ …) to halves (x₀ x₁ …, y₀ y₁ …)"),
        ("q and k permuted twice", interleaved, "from halves to pairs, as before a conversion to GGUF"),
    )
    sizes = base.stored.config.layer
    for name, reorder, how in orders:
        tensors: dict[str, Tensor] = dict(base.stored.tensors)
        for key, tensor in base.stored.tensors.items():
            for part, heads in ((".q_proj.", sizes.num_heads), (".k_proj.", sizes.num_kv_heads)):
                if part in key:
                    tensors[key] = reorder(tensor, heads)
        yield replace(base, name=name, remedy=remedy.format(how), stored=replace(base.stored, tensors=tensors))


def _from_pairs(weight: Tensor, heads: int) -> Tensor:
    """Undoes `interleaved`."""
    rows = weight.shape[0] // heads
    return weight.reshape(heads, rows // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape).contiguous()
