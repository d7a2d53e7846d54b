"""aquiline tune: finds the fastest method and tree on a user's prompts, and saves them for load()."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging

from aquiline.commands.common import add_machine_options, add_target_option

logger = logging.getLogger("aquiline")


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("prompts", nargs="*", help="files or folders of prompts (default: the embedded questions)")
    add_target_option(parser)
    parser.add_argument("--draft", help="head: auto, shipped name, folder or hub id (default: auto)")
    parser.add_argument("--output", help="file to write (default: tuned.json)")
    parser.add_argument(
        "--num-prompts", type=int, help="upper bound on prompts; half propose, half confirm (default: 16)"
    )
    parser.add_argument("--max-new-tokens", type=int, help="upper bound on tokens per answer (default: 96)")
    parser.add_argument("--temperature", type=float, help="temperature of the answers (default: 0)")
    parser.add_argument("--seed", type=int, help="seed of sampled answers")
    parser.add_argument("--finalists", type=int, help="proposals per drafter that are confirmed (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_machine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from aquiline.bench.tune import TuneSettings, tune
    from aquiline.checkpoints.head_names import SHIPPED, resolve_head

    names = (
        "target", "draft", "output", "num_prompts", "max_new_tokens", "temperature", "seed", "finalists", "dtype",
        "device", "threads",
    )  # fmt: skip
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if "seed" in given and not given.get("temperature"):
        logger.warning("--seed has no effect at temperature 0, which is greedy")
    if given.get("draft", "auto") != "auto":
        head = resolve_head(given["draft"])
        given["draft"] = head.name if head.parent == SHIPPED else str(head)  # a name also works on other machines
    report = tune(TuneSettings(prompts=tuple(arguments.prompts), **given))
    if arguments.json:
        record = {"path": str(report.path), "choice": dataclasses.asdict(report.choice), "contestants": report.rows}
        print(json.dumps(record, indent=2, default=str))
        return 0
    print(report.text)
    print(f"\n{report.choice.method} is the fastest here: written to {report.path}")
    logger.info('use it: aquiline generate --tree %s "…", or aquiline.load(…, tree="%s")', report.path, report.path)
    return 0
