"""Reads EAGLE heads of any dialect into checked tensors and a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from aquiline.checkpoints.eagle.dialects import Translated, translate
from aquiline.checkpoints.eagle.gguf import read_gguf_head
from aquiline.checkpoints.eagle.layer_ids import looks_like_outputs, resolve_layer_ids
from aquiline.checkpoints.eagle.stored import StoredHead, check_tensors, head_config
from aquiline.checkpoints.eagle.vocabulary import resolve_vocabulary
from aquiline.checkpoints.report import HeadReport, fits
from aquiline.drafters.eagle_network import HeadConfig
from aquiline.models.tensors import check_values, read_weights
from aquiline.targets.target import Feature, TargetShape


@dataclass(frozen=True)
class HeadChoices:
    """Settings that override a checkpoint where it is silent or wrong.

    Attributes:
        layer_ids: "boundary" or "output", the convention of its layer ids.
    """

    layer_ids: str | None = None
    norm_before_residual: bool | None = None
    rope_theta: float | None = None


def read_eagle(
    path: Path, config: Mapping[str, Any], target: TargetShape | None, choices: HeadChoices
) -> tuple[StoredHead, HeadReport]:
    """Reads an EAGLE head of any dialect; missing, extra and invalid parts are errors.

    Args:
        path: folder of the head, or a GGUF file.
        config: its config.json; empty for a GGUF file, whose header has it.
        target: sizes of the target; None checks the head against itself alone.

    Returns:
        The checked tensors in their stored dtypes, and the report.

    Raises:
        ValueError: for anything that is not exactly a head for this target.
    """
    place = str(path)
    files: tuple[str, ...] = (path.name,)
    if path.suffix == ".gguf" and path.is_file():
        translated = read_gguf_head(path)
    else:
        given, names = read_weights(path)
        translated, files = translate(config, given, place), ("config.json", *names)
    raw, tensors = _overruled(translated.config, choices), dict(translated.tensors)
    d2t, t2d, embedding = (tensors.pop(name, None) for name in ("d2t", "t2d", "embed_tokens.weight"))
    features: tuple[Feature, ...] = ("final",)
    origin = "after the final norm, as EAGLE-1/2 does"
    if translated.kind == "eagle3":
        features, origin = resolve_layer_ids(raw, target.num_layers if target else None, place, choices.layer_ids)
    sizes = head_config(translated.kind, raw, tensors, target, features, place)
    fc_notes = _check_fc_bias(translated, raw, sizes, place)
    check_tensors(sizes, tensors, place)
    ids, map_origin = _vocabulary(sizes, raw, d2t, t2d, place)
    _check_embedding(sizes, embedding, place)
    fingerprint, gamma, window = (raw.get(f"aquiline_{key}") for key in ("target_fingerprint", "gamma", "window"))
    stored = StoredHead(sizes, tensors, ids, embedding, fingerprint, gamma, window or None)
    notes = (*translated.notes, *fc_notes, *_doubts(stored, raw, translated.dialect, target, choices))
    return stored, _report(path, translated.dialect, files, stored, (origin, map_origin), target, notes)


def _overruled(config: Mapping[str, Any], choices: HeadChoices) -> dict[str, Any]:
    raw = dict(config)
    if choices.norm_before_residual is not None:
        raw["norm_before_residual"] = choices.norm_before_residual
    if choices.rope_theta is not None:
        raw["rope_theta"] = choices.rope_theta
        if raw.get("rope_parameters"):
            raw["rope_parameters"] = {**raw["rope_parameters"], "rope_theta": choices.rope_theta}
    return raw


def _check_fc_bias(translated: Translated, raw: Mapping[str, Any], config: HeadConfig, place: str) -> list[str]:
    """Checks the key `bias`, which means the fc's bias; EAGLE-1/2 heads without the key have one."""
    declared = raw.get("bias")
    if declared and not config.fc_bias:
        raise ValueError(
            f'{place}: config.json says "bias": true, but fc.bias is missing; expected ({config.hidden_size},). '
            'If the head has none, write "bias": false'
        )
    if declared is False and config.fc_bias and translated.dialect != "sglang":
        raise ValueError(
            f'{place}: fc.bias is there, but config.json says "bias": false; the reference implementation would '
            'drop it. Write "bias": true if the head was trained with it, or remove the tensor'
        )
    if declared is None and not config.fc_bias and config.kind == "eagle" and translated.dialect == "safeailab":
        return [
            "config.json does not name bias, and fc.bias is missing: read as none (the reference adds a random one)"
        ]
    return []


def _vocabulary(
    config: HeadConfig, raw: Mapping[str, Any], d2t: Tensor | None, t2d: Tensor | None, place: str
) -> tuple[Tensor | None, str]:
    for key in ("draft_vocab_size", "truncated_vocab_size"):
        if config.kind == "eagle" and (raw.get(key) or config.vocab_size) != config.vocab_size:
            raise ValueError(
                f"{place}: config.json says {key} = {raw[key]}, but an EAGLE-1/2 head drafts all {config.vocab_size} "
                "tokens through the target's LM head; this is another method, or the key belongs to another head"
            )
    if config.kind == "eagle" and (d2t is not None or t2d is not None):
        raise ValueError(f"{place}: d2t or t2d is there, but an EAGLE-1/2 head drafts all tokens; it is another method")
    return resolve_vocabulary(d2t, t2d, config.draft_vocab_size, config.vocab_size, place)


def _check_embedding(config: HeadConfig, embedding: Tensor | None, place: str) -> None:
    if embedding is None:
        if config.hidden_size != config.target_hidden_size:
            raise ValueError(
                f"{place}: embed_tokens.weight is missing; a head of width {config.hidden_size} cannot use the "
                f"embedding of a target of width {config.target_hidden_size}, fetch the head with its embedding"
            )
        return
    expected = (config.vocab_size, config.hidden_size)
    if tuple(embedding.shape) != expected:
        raise ValueError(f"{place}: embed_tokens.weight has shape {tuple(embedding.shape)}, expected {expected}")
    check_values("embed_tokens.weight", embedding, place)


def _doubts(
    stored: StoredHead, raw: Mapping[str, Any], dialect: str, target: TargetShape | None, choices: HeadChoices
) -> list[str]:
    """Lists valid settings that often cause low acceptance."""
    notes, theta = [], stored.config.layer.rope.theta
    named = raw.get("rope_theta") is not None or (raw.get("rope_parameters") or {}).get("rope_theta") is not None
    if not named:
        notes.append("config.json names no rope base: read as 10000, the default of the reference implementation")
    elif dialect == "angelslim" and theta != 10000 and choices.rope_theta is None:
        notes.append(f"AngelSlim heads that name the base {theta:g} were reported to accept more with 10000")
    if (
        target is not None
        and choices.layer_ids is None
        and looks_like_outputs(stored.config.features, target.num_layers)
    ):
        notes.append("the features are one layer below the default; if acceptance is low, read the ids as outputs")
    if raw.get("tie_word_embeddings") and stored.config.kind == "eagle3":
        notes.append("tie_word_embeddings is ignored: the head's LM head is its own")
    if stored.embedding is not None and stored.config.hidden_size == stored.config.target_hidden_size:
        notes.append("it uses its own embedding; most heads share the target's")
    return notes


def _report(
    path: Path,
    dialect: str,
    files: tuple[str, ...],
    stored: StoredHead,
    origins: tuple[str, str],
    target: TargetShape | None,
    notes: tuple[str, ...],
) -> HeadReport:
    """Writes the report; `origins` tells how features and vocabulary were found."""
    return HeadReport(
        path=str(path),
        kind=stored.config.kind,
        dialect=dialect,
        files=files,
        config=stored.config,
        dtype=" and ".join(sorted({str(t.dtype).removeprefix("torch.") for t in stored.tensors.values()})),
        parameters=stored.parameters,
        features=f"{', '.join(str(f) for f in stored.config.features)} ({origins[0]})",
        vocabulary=f"{stored.config.draft_vocab_size} tokens ({origins[1]})",
        embedding="the target's" if stored.embedding is None else "its own",
        fingerprint=stored.fingerprint,
        gamma=stored.gamma,
        checked_against=fits(target),
        notes=notes,
        window=stored.window,
    )
