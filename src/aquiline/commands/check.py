"""aquiline check: measures a head in training's forward and in the engine, forecasts its speed, and names mistakes."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aquiline.commands.common import add_machine_options, add_setting_options, add_target_option, given_settings

if TYPE_CHECKING:
    from aquiline.check.settings import CheckSettings

logger = logging.getLogger("aquiline")

_LOSSLESS = {"num_prompts": 8}
"""Defaults of --lossless, which decodes every prompt ten times."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    from aquiline.check.settings import CheckSettings

    parser.add_argument("head", nargs="?", help="shipped name, folder, GGUF file or hub id; with --lossless any draft")
    parser.add_argument("prompts", nargs="*", help="files or folders of prompts (default: the embedded questions)")
    add_target_option(parser)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--alpha", metavar="A,B,…", help="forecast the speed of a head with this acceptance by depth, without a head"
    )
    mode.add_argument(
        "--lossless", action="store_true", help="compare greedy and seeded outputs with plain decoding's instead"
    )
    add_setting_options(parser, CheckSettings, ("num_prompts", "max_new_tokens", "depth", "temperature", "seed"))
    parser.add_argument("--output", metavar="FILE", help="write a page with charts of acceptance and forecast")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_machine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns 1 if the check fails."""
    settings = _settings(arguments)
    if arguments.lossless:
        return _lossless(arguments, settings)
    from aquiline.check.report import check_json, check_page, check_text
    from aquiline.check.run import check
    from aquiline.models.files import write_text

    with _progress(arguments.quiet) as advance:
        report = check(settings, advance=advance)
    print(json.dumps(check_json(report), ensure_ascii=False) if arguments.json else check_text(report))
    if arguments.output is not None:
        write_text(Path(arguments.output).expanduser(), check_page(report))
        logger.info("page: %s", arguments.output)
    return 0 if report.passed else 1


def _lossless(arguments: argparse.Namespace, settings: CheckSettings) -> int:
    from aquiline.check.lossless import check_lossless, lossless_json, lossless_text

    if arguments.output is not None:
        raise ValueError("--output has no effect with --lossless, which draws nothing; leave it out")
    with _progress(arguments.quiet) as advance:
        report = check_lossless(settings, advance=advance)
    print(json.dumps(lossless_json(report), ensure_ascii=False) if arguments.json else lossless_text(report))
    return 0 if report.passed else 1


def _settings(arguments: argparse.Namespace) -> CheckSettings:
    from aquiline.check.settings import CheckSettings
    from aquiline.models.files import check_output

    if arguments.output is not None:
        output = Path(arguments.output).expanduser()
        check_output(output)
        if output.is_dir() or not output.parent.is_dir():
            raise ValueError(f"--output is {arguments.output!r}; allowed: a file in a folder that exists")
    given: dict[str, Any] = {"alpha": _alphas(arguments.alpha)} if arguments.alpha is not None else {}
    if given and arguments.head is not None:
        raise ValueError("--alpha forecasts without a head, and a head was given; leave one out")
    idle, where = (("depth",), "with") if arguments.lossless else (("temperature", "seed"), "without")
    for name in idle:
        if getattr(arguments, name) is not None:
            logger.warning("--%s has no effect %s --lossless", name, where)
    chosen = given_settings(arguments, CheckSettings) | given
    return CheckSettings(**((_LOSSLESS if arguments.lossless else {}) | chosen))


def _alphas(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"--alpha is {text!r}; allowed: shares with commas between, like .6,.58,.55") from error


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on standard error that names the stage."""
    if quiet:
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        stages: dict[str, Any] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bar.add_task(stage, total=total)
            bar.update(stages[stage], completed=done)

        yield advance
