"""aquiline tune: finds the fastest method and tree on a user's prompts, and saves them for load()."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging

from aquiline.commands.common import add_machine_options, add_setting_options, add_target_option, given_settings

logger = logging.getLogger("aquiline")


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    from aquiline.bench.settings import TuneSettings

    parser.add_argument("prompts", nargs="*", help="files or folders of prompts (default: the embedded questions)")
    add_target_option(parser)
    names = ("draft", "output", "num_prompts", "max_new_tokens", "temperature", "seed", "finalists")
    add_setting_options(parser, TuneSettings, names)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_machine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from aquiline.bench.settings import TuneSettings
    from aquiline.bench.tune import tune
    from aquiline.checkpoints.open import SHIPPED, resolve_head

    given = given_settings(arguments, TuneSettings)
    if "seed" in given and not given.get("temperature"):
        logger.warning("--seed has no effect at temperature 0, which is greedy")
    if given.get("draft", "auto") != "auto":
        head = resolve_head(given["draft"])
        given["draft"] = head.name if head.parent == SHIPPED else str(head)  # a name also works on other machines
    report = tune(TuneSettings(**given))
    if arguments.json:
        record = {"path": str(report.path), "choice": dataclasses.asdict(report.choice), "contestants": report.rows}
        print(json.dumps(record, indent=2, default=str))
        return 0
    print(report.text)
    print(f"\n{report.choice.method} is the fastest here: written to {report.path}")
    logger.info('use it: aquiline generate --tree %s "…", or aquiline.load(…, tree="%s")', report.path, report.path)
    return 0
