"""aquiline train: a draft head for a target."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from typing import Any

_PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"lr": 3e-5, "muon_lr": 0.0, "warmup_positions": 2_000 * 4 * 2048},
}


def add(parser: argparse.ArgumentParser) -> None:
    """Adds an option for every field of `TrainSettings`."""
    from aquiline.training.settings import TrainSettings

    parser.add_argument("data", nargs="+", help="training sets made by `aquiline prepare`")
    parser.add_argument("--target", default="smollm2", help="alias, folder, GGUF file or hub id (default: smollm2)")
    parser.add_argument("--output", required=True, help="folder for checkpoints, metrics and the head")
    parser.add_argument("--resume", action="store_true", help="go on from the output's checkpoint")
    parser.add_argument("--preset", choices=sorted(_PRESETS), help="paper: EAGLE's published learning rate and warm-up")
    hints = typing.get_type_hints(TrainSettings)
    for field in dataclasses.fields(TrainSettings):
        if field.name in ("target", "data", "output"):
            continue
        _add_field(parser, field.name, hints[field.name], field.default)


def _add_field(parser: argparse.ArgumentParser, name: str, hint: Any, default: Any) -> None:
    flag = "--method" if name == "kind" else f"--{name.replace('_', '-')}"
    inner = [a for a in typing.get_args(hint) if a is not type(None)]
    if hint is bool:
        parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None)
    elif typing.get_origin(hint) is tuple or (inner and typing.get_origin(inner[0]) is tuple):
        of = hint if typing.get_origin(hint) is tuple else inner[0]
        kind = typing.get_args(of)[0]
        parser.add_argument(flag, dest=name, nargs="+", type=_scalar(kind), help=f"(default: {default})")
    else:
        kind = inner[0] if inner else hint
        parser.add_argument(flag, dest=name, type=_scalar(kind), help=f"(default: {default})")


def _scalar(kind: Any) -> Any:
    if kind is int:
        return lambda text: int(float(text)) if "e" in text else int(text.replace("_", ""))
    return kind if kind in (float, str) else str


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from aquiline.checkpoints.targets import resolve_target
    from aquiline.training.settings import TrainSettings
    from aquiline.training.trainer import train

    given = dict(_PRESETS.get(arguments.preset, {}))
    for field in dataclasses.fields(TrainSettings):
        value = getattr(arguments, field.name, None)
        if value is not None:
            given[field.name] = tuple(value) if isinstance(value, list) else value
    given["target"] = str(resolve_target(arguments.target))
    report = train(TrainSettings(**given), resume=arguments.resume)
    print(
        f"{report.stopped}: {report.steps:,} steps, {report.positions:,} positions in {report.seconds / 60:.1f} minutes"
    )
    for name, rates in report.acceptance.items():
        print(f"  n-α on {name}: {' '.join(f'{rate:.3f}' for rate in rates)}")
    return 0
