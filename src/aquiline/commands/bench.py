"""aquiline bench: drafting methods side by side."""

from __future__ import annotations

import argparse
import json
import logging
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aquiline.commands.common import add_machine_options, add_target_option

logger = logging.getLogger("aquiline")

_SHARED = (
    "target",
    "output",
    "questions",
    "tasks",
    "per_task",
    "max_new_tokens",
    "batch_sizes",
    "dtype",
    "device",
    "threads",
)
"""Options of both kinds of run."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="preset", action="store_const", const="quick", help="about 3 minutes")
    size.add_argument("--full", dest="preset", action="store_const", const="full", help="all questions, hours")
    parser.set_defaults(preset="standard")
    add_target_option(parser)
    parser.add_argument("--output", help="folder for results; a run that was cut off there is resumed")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="these alone, beside plain; --list shows all")
    parser.add_argument("--head", action="append", metavar="KIND=FOLDER", help="head that does not ship (repeatable)")
    parser.add_argument("--questions", nargs="+", metavar="PATH", help="files or folders (default: the embedded set)")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="these alone")
    parser.add_argument("--per-task", type=int, help="questions of each task (ablations: 0 for held-out data alone)")
    parser.add_argument("--max-new-tokens", type=int, help="budget of an answer")
    parser.add_argument("--temperatures", nargs="+", type=float, help="each is a run of its own (default: 0)")
    parser.add_argument("--batch-sizes", nargs="+", type=int, help="rows decoded together")
    parser.add_argument("--batch-task", help="task for the larger batches (default: MT-bench)")
    parser.add_argument("--seed", type=int, help="of sampled answers")
    parser.add_argument("--no-cost-curve", dest="cost_curve", action="store_false", default=None)
    parser.add_argument("--json", action="store_true", help="print results.json instead of the table")
    parser.add_argument("--list", action="store_true", help="list methods and tasks, and end")
    parser.add_argument(
        "--download",
        metavar="DIR",
        help="get the papers' questions from the model hub, as files for --questions, and end; "
        "--tasks and --per-task choose",
    )
    group = parser.add_argument_group("the papers' findings, reproduced small")
    group.add_argument(
        "--ablations",
        nargs="*",
        metavar="SET",
        help="train small heads on equal data (sets made by `prepare`) and compare; without sets, compare heads "
        "that are there already, named by --head NAME=FOLDER",
    )
    group.add_argument("--positions", type=int, help="positions that each head is trained on (default: 300,000)")
    group.add_argument("--seeds", nargs="+", type=int, help="each is one training of every head (default: 0 1 2)")
    group.add_argument("--heads", nargs="+", metavar="NAME", help="these heads alone")
    group.add_argument("--features", metavar="DIR", help="folder that keeps the target's features for all trainings")
    group.add_argument(
        "--training",
        nargs="+",
        metavar="NAME=VALUE",
        help="settings of every training, as `aquiline train` names them (batch_positions=4096, data_weights=1,3)",
    )
    add_machine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    if arguments.list:
        return _list(arguments.json)
    if arguments.download is not None:
        return _download(arguments)
    if arguments.ablations is not None:
        return _ablations(arguments)
    for name in ("positions", "seeds", "heads", "features", "training"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} has no effect without --ablations; add it or leave --{name} out")
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


def _ablations(arguments: argparse.Namespace) -> int:
    from aquiline.bench.ablations import AblationSettings, run_ablations

    for name in ("methods", "temperatures", "batch_task", "seed", "cost_curve"):
        if getattr(arguments, name) is not None:
            option = "--no-cost-curve" if name == "cost_curve" else f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} has no effect on --ablations; leave one of the two out")
    if arguments.preset != "standard":
        raise ValueError(f"--{arguments.preset} has no effect on --ablations; leave one of the two out")
    names = (*_SHARED, "positions", "seeds", "heads", "features")
    training = tuple(_setting(text) for text in arguments.training or ())
    given = tuple(_pair(text) for text in arguments.head or ())
    settings = AblationSettings(
        data=tuple(arguments.ablations), given=given, training=training, **_values(arguments, names)
    )
    report = run_ablations(settings, _trainer(arguments), quiet=arguments.quiet)
    print(json.dumps(report.results) if arguments.json else report.markdown)
    logger.info("results: %s", report.folder)
    return 0


def _setting(text: str) -> tuple[str, Any]:
    """A setting of the trainer, of the kind that its default or its neighbours have."""
    from aquiline.training.settings import TrainSettings

    name, _, value = text.partition("=")
    hint = typing.get_type_hints(TrainSettings).get(name)
    if hint is None or not value:
        raise ValueError(f"--training is given {text!r}; allowed: NAME=VALUE with a setting of `aquiline train --help`")
    given: list[Any] = []
    for part in value.split(","):
        try:
            given.append(json.loads(part))
        except json.JSONDecodeError:
            given.append(part)
    return name, tuple(given) if "tuple" in str(hint) else given[0]


def _trainer(arguments: argparse.Namespace) -> Callable[[Mapping[str, Any], Path], None]:
    """Trains one head of the ablations; here, because measuring does not import training."""
    from aquiline.models.resolve import resolve_target
    from aquiline.training.loop import train
    from aquiline.training.settings import TrainSettings

    target = str(resolve_target(arguments.target))

    def run_training(fields: Mapping[str, Any], output: Path) -> None:
        report = train(TrainSettings(target=target, output=str(output), **fields), resume=True)
        if report.stopped != "finished":
            raise KeyboardInterrupt  # it caught the signal that was meant for all of us

    return run_training


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    given = _values(arguments, (*_SHARED, "methods", "temperatures", "batch_task", "seed", "cost_curve"))
    if arguments.methods:
        given["try_methods"] = ()  # what was asked for by name must run, and nothing else
        given["reference_every"] = 1  # and the time that the references save in a long list is not needed
    if arguments.head:
        given["heads"] = tuple(_head(text) for text in arguments.head)
    return given


def _values(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The options that were given, lists as tuples."""
    values = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _pair(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not equals or not folder:
        raise ValueError(f"--head is {text!r}; allowed: NAME=FOLDER")
    return name, folder


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
