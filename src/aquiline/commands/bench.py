"""aquiline bench: drafting methods side by side."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from aquiline.commands.common import add_machine_options, add_setting_options, add_target_option, given_settings

logger = logging.getLogger("aquiline")


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    from aquiline.bench.settings import BenchSettings

    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", dest="preset", action="store_const", const="quick", help="about 3 minutes on two cores"
    )
    size.add_argument("--full", dest="preset", action="store_const", const="full", help="all questions; takes hours")
    parser.set_defaults(preset="standard")
    add_target_option(parser)
    parser.add_argument(
        "--head",
        action="append",
        metavar="KIND=FOLDER",
        help="a head that does not ship; KIND is eagle, eagle3, medusa, hydra or small-model (repeatable)",
    )
    names = {field.name for field in dataclasses.fields(BenchSettings)}
    add_setting_options(parser, BenchSettings, names - {"target", "try_methods", "heads", "dtype", "device", "threads"})
    parser.add_argument("--json", action="store_true", help="print results.json instead of the table")
    parser.add_argument("--list", action="store_true", help="list methods and tasks, then exit")
    parser.add_argument(
        "--download",
        metavar="DIR",
        help="download the papers' questions from the model hub, as files for --questions, then exit; "
        "--tasks and --per-task select",
    )
    add_machine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    if arguments.list:
        return _list(arguments.json)
    if arguments.download is not None:
        return _download(arguments)
    from aquiline.bench.runner import run_bench
    from aquiline.bench.settings import PRESETS, BenchSettings

    report = run_bench(BenchSettings(**{**PRESETS[arguments.preset], **_given(arguments)}), quiet=arguments.quiet)
    print(json.dumps(report.results) if arguments.json else report.markdown)
    logger.info("report: %s", report.folder / "report.html")
    return 0


def _download(arguments: argparse.Namespace) -> int:
    from aquiline.bench.download import download_questions

    chosen = {} if arguments.per_task is None else {"count": arguments.per_task}
    files = download_questions(Path(arguments.download).expanduser(), arguments.tasks or (), **chosen)
    print(json.dumps([str(file) for file in files]) if arguments.json else "\n".join(map(str, files)))
    logger.info("use them: aquiline bench --questions %s", arguments.download)
    return 0


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Converts the given options to fields of `BenchSettings`."""
    from aquiline.bench.settings import BenchSettings

    given = given_settings(arguments, BenchSettings)
    if arguments.methods:
        given["try_methods"] = ()  # methods requested by name must run, and no others
        given.setdefault("reference_every", 1)  # a short list needs no savings
    if arguments.head:
        given["heads"] = tuple(_head(text) for text in arguments.head)
    return given


def _head(text: str) -> tuple[str, str]:
    from aquiline.bench.methods import HEAD_OF

    kind, equals, folder = text.partition("=")
    if not equals or not folder or kind not in HEAD_OF.values():
        allowed = ", ".join(dict.fromkeys(HEAD_OF.values()))
        raise ValueError(f"--head is {text!r}; allowed: KIND=FOLDER with a kind of {allowed}")
    return kind, folder


def _list(as_json: bool) -> int:
    from aquiline.bench.methods import METHODS
    from aquiline.bench.tasks import TITLES

    if as_json:
        print(json.dumps({"methods": METHODS, "tasks": TITLES}, indent=2, ensure_ascii=False))
        return 0
    for title, entries in (("methods", METHODS), ("tasks", TITLES)):
        print(f"{title}:")
        for name, text in entries.items():
            print(f"  {name:<14} {text}")
    return 0
