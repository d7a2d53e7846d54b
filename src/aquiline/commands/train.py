"""aquiline train: a draft head for a target."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import typing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any

_PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"lr": 3e-5, "muon_lr": 0.0, "warmup_positions": 2_000 * 4 * 2048},
}
_METHODS = ("eagle3", "eagle", "medusa", "hydra", "small-model")
_OWN = ("target", "data", "output", "kind")


def add(parser: argparse.ArgumentParser) -> None:
    """Adds an option for every setting of a training."""
    from aquiline.training.heads_settings import HeadsSettings
    from aquiline.training.settings import TrainSettings

    parser.add_argument("data", nargs="+", help="training sets made by `aquiline prepare`")
    parser.add_argument("--target", default="smollm2", help="alias, folder, GGUF file or hub id (default: smollm2)")
    parser.add_argument("--output", required=True, help="folder for checkpoints, metrics and the head")
    parser.add_argument(
        "--method", dest="kind", choices=_METHODS, default="eagle3", help="what to train (default: eagle3)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the output's checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="start anew where the output has a checkpoint")
    parser.add_argument("--preset", choices=sorted(_PRESETS), help="paper: EAGLE's published learning rate and warm-up")
    parser.add_argument("--json", action="store_true", help="end with a JSON object")
    seen: set[str] = set(_OWN)
    for title, settings in (("settings", TrainSettings), ("medusa, hydra and small-model", HeadsSettings)):
        group = parser.add_argument_group(title)
        hints = typing.get_type_hints(settings)
        for field in dataclasses.fields(settings):
            if field.name not in seen:
                seen.add(field.name)
                _add_field(group, field.name, hints[field.name], field.default)


def _add_field(group: Any, name: str, hint: Any, default: Any) -> None:
    flag = f"--{name.replace('_', '-')}"
    inner = [a for a in typing.get_args(hint) if a is not type(None)]
    if hint is bool:
        group.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None)
    elif typing.get_origin(hint) is tuple or (inner and typing.get_origin(inner[0]) is tuple):
        of = hint if typing.get_origin(hint) is tuple else inner[0]
        kind = typing.get_args(of)[0]
        group.add_argument(flag, dest=name, nargs="+", type=_scalar(kind), help=f"(default: {default})")
    else:
        kind = inner[0] if inner else hint
        group.add_argument(flag, dest=name, type=_scalar(kind), help=f"(default: {default})")


def _scalar(kind: Any) -> Any:
    if kind is not int:
        return kind if kind in (float, str) else str

    def integer(text: str) -> int:
        return int(float(text)) if "e" in text else int(text.replace("_", ""))

    return integer


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from aquiline.models.resolve import resolve_target
    from aquiline.training.heads_settings import KINDS, HeadsSettings
    from aquiline.training.heads_training import train_heads
    from aquiline.training.loop import train
    from aquiline.training.processes import is_main_process
    from aquiline.training.settings import TrainSettings

    heads = arguments.kind in KINDS
    given = _given(arguments, HeadsSettings if heads else TrainSettings)
    given["target"] = str(resolve_target(arguments.target))
    with _progress(arguments):
        if heads:
            report = train_heads(HeadsSettings(**given), resume=arguments.resume, overwrite=arguments.overwrite)
        else:
            report = train(TrainSettings(**given), resume=arguments.resume, overwrite=arguments.overwrite)
    if is_main_process():
        _show(report, arguments)
    return 0 if report.stopped == "finished" else 128 + signal.Signals[report.stopped]


def _show(report: Any, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps(dataclasses.asdict(report)))
        return
    print(
        f"{report.stopped}: {report.steps:,} steps, {report.positions:,} positions in {report.seconds / 60:.1f} minutes"
    )
    for name, rates in report.acceptance.items():
        print(f"  n-α on {name}: {' '.join(f'{rate:.3f}' for rate in rates)}")
    if report.stopped == "finished":
        print(f'use it: aquiline generate --target {arguments.target} --draft {arguments.output} "…"')
    else:
        print("the same command with --resume goes on from here")


@contextmanager
def _progress(arguments: argparse.Namespace) -> Iterator[None]:
    """Where the lines of a training go: nowhere, or away from the JSON, if that was asked for."""
    with ExitStack() as stack:
        if arguments.quiet:
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w", encoding="utf-8"))))
        elif arguments.json:
            stack.enter_context(redirect_stdout(sys.stderr))
        yield


def _given(arguments: argparse.Namespace, settings: type[Any]) -> dict[str, Any]:
    """The settings that were named, by an option or a preset.

    Raises:
        ValueError: for a setting that this method does not have.
    """
    from aquiline.training.heads_settings import HeadsSettings
    from aquiline.training.settings import TrainSettings

    mine = {field.name for field in dataclasses.fields(settings)}
    every = {field.name for kind in (TrainSettings, HeadsSettings) for field in dataclasses.fields(kind)}
    given = dict(_PRESETS.get(arguments.preset, {}))
    for name in sorted(every):
        value = getattr(arguments, name)
        if value is None:
            continue
        if name not in mine:
            raise ValueError(
                f"--{name.replace('_', '-')} has no effect with --method {arguments.kind}; leave it out, or see "
                "`aquiline train --help` for the settings of each method"
            )
        given[name] = tuple(value) if isinstance(value, list) else value
    return given
