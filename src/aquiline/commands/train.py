"""aquiline train: a draft head for a target."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any

from aquiline.commands.common import add_setting_options, add_target_option, given_settings

_PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"lr": 3e-5, "muon_lr": 0.0, "warmup_positions": 2_000 * 4 * 2048},
}


def add(parser: argparse.ArgumentParser) -> None:
    """Adds an option for every setting of a training."""
    from aquiline.training.settings import KINDS, PARALLEL, SMALL, TrainSettings, settings_of

    parser.add_argument("data", nargs="+", help="training sets made by `aquiline prepare`")
    add_target_option(parser)
    parser.add_argument("--output", required=True, help="folder for checkpoints, metrics and the finished head")
    parser.add_argument(
        "--method", dest="kind", choices=KINDS, default="eagle3", help="what to train (default: eagle3)"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in the output folder")
    parser.add_argument("--overwrite", action="store_true", help="start over in an output folder with a checkpoint")
    parser.add_argument("--preset", choices=sorted(_PRESETS), help="paper: EAGLE's published learning rate and warm-up")
    parser.add_argument("--json", action="store_true", help="end with a JSON object")
    done = {"target", "data", "output", "kind"}
    groups = (
        ("settings of every method", settings_of(*KINDS)),
        ("eagle3 and eagle", settings_of("eagle3") | settings_of("eagle")),
        ("medusa and hydra", settings_of(*PARALLEL)),
        ("small-model", settings_of(*SMALL)),
    )
    for title, names in groups:
        add_setting_options(parser.add_argument_group(title), TrainSettings, names - done)
        done |= names


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from aquiline.models.resolve import resolve_target
    from aquiline.training.loop import train
    from aquiline.training.processes import is_main_process
    from aquiline.training.settings import TrainSettings

    given = _given(arguments)
    given["target"] = str(resolve_target(arguments.target))
    settings = TrainSettings(**given)
    with _progress(arguments):
        report = train(settings, resume=arguments.resume, overwrite=arguments.overwrite)
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
        print("the same command with --resume continues from here")


@contextmanager
def _progress(arguments: argparse.Namespace) -> Iterator[None]:
    """Sends the lines of a training nowhere (--quiet), or to standard error (--json)."""
    with ExitStack() as stack:
        if arguments.quiet:
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w", encoding="utf-8"))))
        elif arguments.json:
            stack.enter_context(redirect_stdout(sys.stderr))
        yield


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were named, by an option or a preset.

    Raises:
        ValueError: for a setting without effect on this method, its default included.
    """
    from aquiline.training.settings import TrainSettings, settings_of

    given = given_settings(arguments, TrainSettings)
    for name in sorted(given.keys() - settings_of(arguments.kind)):
        raise ValueError(
            f"--{name.replace('_', '-')} has no effect with --method {arguments.kind}; leave it out, or see "
            "`aquiline train --help` for the settings of each method"
        )
    return {**_PRESETS.get(arguments.preset, {}), **given}
