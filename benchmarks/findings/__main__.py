"""Trains small heads on equal data and compares them where the papers do.

    python -m benchmarks.findings sets/regenerated --features features --per-task 0 --positions 40000
    python -m benchmarks.findings --head eagle=smollm2-eagle --questions FOLDER

Run it in the root of the repository. A run that was cut off resumes with the same command.
See docs/findings.md.
"""

from __future__ import annotations

import argparse
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aquiline.drafters.eagle_network import build_network
from aquiline.models.resolve import resolve_target
from aquiline.training.loop import train
from aquiline.training.settings import TrainSettings
from benchmarks.findings.ablations import AblationSettings, TrainHead, run_ablations
from benchmarks.findings.comparisons import HEADS, HeadSpec
from benchmarks.findings.inputs import VARIANTS


def main(arguments: list[str] | None = None) -> None:
    """Runs the command."""
    given = vars(_parser().parse_args(arguments))
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    report = run_ablations(AblationSettings(**values), trainer(given["target"]))
    print(report.markdown)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.findings",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    names = [spec.name for spec in HEADS]
    parser.add_argument("data", nargs="*", metavar="SET", help="training sets made by `aquiline prepare`")
    parser.add_argument("--target", default="smollm2", help="alias, folder, GGUF file or hub id (default: smollm2)")
    parser.add_argument(
        "--head", dest="given", action="append", type=_pair, metavar="NAME=FOLDER",
        help="compare this head and train none (repeatable)",
    )  # fmt: skip
    parser.add_argument("--heads", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--positions", type=int, help="positions that each head is trained on (default: 300,000)")
    parser.add_argument("--seeds", nargs="+", type=int, help="each trains every head once (default: 0 1 2)")
    parser.add_argument(
        "--training", nargs="+", type=_setting, metavar="NAME=VALUE",
        help="settings of every training: fields of TrainSettings (batch_positions=4096, data_weights=1,3)",
    )  # fmt: skip
    parser.add_argument("--features", metavar="DIR", help="folder that keeps the target's features for all trainings")
    parser.add_argument("--questions", nargs="+", metavar="PATH", help="files or folders (default: the embedded set)")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="(default: mt_bench)")
    parser.add_argument("--per-task", type=int, help="questions of a task (default: 10); 0: held-out data alone")
    parser.add_argument("--max-new-tokens", type=int, help="budget of an answer in tokens (default: 128)")
    parser.add_argument("--batch-sizes", nargs="+", type=int, help="rows decoded together (default: 1 2 4 8)")
    parser.add_argument("--output", metavar="DIR", help="folder for heads and results (default: ablations)")
    parser.add_argument("--dtype", help="of the weights (default: the fastest on this machine)")
    parser.add_argument("--device", help="where the target runs (default: cpu)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    return parser


def _pair(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not equals or not folder:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: NAME=FOLDER")
    return name, folder


def _setting(text: str) -> tuple[str, Any]:
    """A training setting: numbers and booleans as JSON, several values separated by commas."""
    name, _, value = text.partition("=")
    hint = typing.get_type_hints(TrainSettings).get(name)
    if hint is None or not value:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: NAME=VALUE with a field of TrainSettings")
    given = tuple(_value(part) for part in value.split(","))
    return name, given if "tuple" in str(hint) else given[0]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def trainer(target: str) -> TrainHead:
    """Trains one head with the public loop; an ablated input with its variant of the network."""
    folder = str(resolve_target(target))

    def run_training(spec: HeadSpec, fields: Mapping[str, Any], output: Path) -> None:
        build = build_network if spec.inputs is None else VARIANTS[spec.inputs]
        report = train(TrainSettings(target=folder, output=str(output), **fields), resume=True, build=build)
        if report.stopped != "finished":
            raise KeyboardInterrupt  # the trainer caught the signal that was meant for the whole run
        if spec.inputs is not None:
            _mark(output / "head" / "config.json", spec.inputs)

    return run_training


def _mark(file: Path, inputs: str) -> None:
    """Says in a head's config.json that it is an ablation, so that no engine drafts with it."""
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | {"aquiline_inputs": inputs}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
