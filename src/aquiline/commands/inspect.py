"""aquiline inspect: what a draft head is, how its files were understood, and whether it fits."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("head", help="folder, GGUF file, hub id or shipped head")
    parser.add_argument("--target", help="check that it fits this alias, folder, GGUF file or hub id")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    group = parser.add_argument_group("where the checkpoint is silent or wrong")
    group.add_argument("--layer-ids", choices=("boundary", "output"), help="how to read its layer ids")
    group.add_argument(
        "--norm-before-residual", action=argparse.BooleanOptionalAction, default=None, help="the residual is normed"
    )
    group.add_argument("--rope-theta", type=float, help="base of the rotary frequencies")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from aquiline.checkpoints.head_names import resolve_head
    from aquiline.models.resolve import resolve_target

    head = resolve_head(arguments.head)
    target = None if arguments.target is None else resolve_target(arguments.target)
    lines = _parallel_heads(head, target) or _eagle(head, target, arguments)
    if arguments.json:
        print(json.dumps({"path": str(head)} | dict(lines), indent=2, default=str, ensure_ascii=False))
        return 0
    print(head)
    for label, value in lines:
        print(f"  {label:<12} {value}")
    return 0


def _eagle(head: Path, target: Path | None, arguments: argparse.Namespace) -> list[tuple[str, Any]]:
    from aquiline.checkpoints.heads import HeadChoices, inspect_head
    from aquiline.checkpoints.target_shape import target_shape

    choices = HeadChoices(arguments.layer_ids, arguments.norm_before_residual, arguments.rope_theta)
    report = inspect_head(head, None if target is None else target_shape(target), choices)
    if not arguments.json:
        return [*report.lines(), *_fingerprints(report.fingerprint, target)]
    fields = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
    config = {"config": dataclasses.asdict(report.config)}
    return list((fields | config | dict(_fingerprints(report.fingerprint, target))).items())


def _parallel_heads(head: Path, target: Path | None) -> list[tuple[str, Any]]:
    """Lines about Medusa or Hydra heads; empty for another kind of head."""
    from aquiline.checkpoints.final_heads import is_final_heads, read_final_heads
    from aquiline.checkpoints.head_files import read_json
    from aquiline.checkpoints.published_heads import inspect_published_heads, published_kind
    from aquiline.checkpoints.target_shape import target_shape
    from aquiline.targets.target import TargetShape

    if published_kind(head):
        report = inspect_published_heads(head, None if target is None else target_shape(target))
        return list(dataclasses.asdict(report).items())
    file = head / "config.json"
    config = read_json(file) if file.is_file() else {}
    if not is_final_heads(config):
        return []
    lines = [(key, value) for key, value in config.items() if key not in ("format", "accuracies")]
    # Without a target, they are read as the heads of one with the sizes that they name.
    own = TargetShape(config.get("vocab_size", 0), config.get("hidden_size", 0), 1, 1)
    read_final_heads(head, own if target is None else target_shape(target))
    lines.append(("checked", "against itself only" if target is None else f"fits {target}"))
    return [*lines, *_fingerprints(config.get("aquiline_target_fingerprint"), target)]


def _fingerprints(recorded: str | None, target: Path | None) -> list[tuple[str, str]]:
    from aquiline.models.resolve import target_fingerprint

    if recorded is None or target is None:
        return []
    same = recorded == target_fingerprint(target)
    text = "this very target" if same else "ANOTHER target of the same sizes: its drafts may rarely be accepted"
    return [("fingerprint", text)]
