"""aquiline serve: a target with its head, behind another engine's server."""

from __future__ import annotations

import argparse
import json
import logging
import shlex

from aquiline.commands.common import add_target_option

logger = logging.getLogger("aquiline")


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="passed through to the engine's server")
    parser.add_argument("--engine", help="vllm")
    add_target_option(parser)
    parser.add_argument("--draft", default="auto", help="head: auto, shipped name, folder, GGUF file, hub id")
    parser.add_argument("--draft-tokens", type=int, default=3, help="length of the draft chains (default: 3)")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the command")
    parser.add_argument("--json", action="store_true", help="with --dry-run: the command as a JSON list")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; with a server, it does not return."""
    if arguments.engine != "vllm":
        raise ValueError(
            f"--engine is {arguments.engine!r}; allowed: vllm. Aquiline has no server of its own yet: give --engine "
            "vllm, or use `aquiline generate --file` and the Python API for batches"
        )
    if arguments.json and not arguments.dry_run:
        raise ValueError("--json has no effect without --dry-run: a server prints its own log; add --dry-run")
    from aquiline.checkpoints.head_names import resolve_head, shipped_head
    from aquiline.models.resolve import resolve_target
    from aquiline.serve.vllm import launch, vllm_command

    target = resolve_target(arguments.target, logger.info)
    head = shipped_head(target) if arguments.draft == "auto" else resolve_head(arguments.draft)
    if head is None:
        raise ValueError(
            f"no shipped head was trained for {arguments.target}; give one with --draft, or train it: "
            f"`aquiline train DATA --target {arguments.target} --output FOLDER`"
        )
    # A dry run need not find vLLM: the command may be meant for another machine.
    program = "vllm" if arguments.dry_run else None
    command = vllm_command(
        target, head, num_draft_tokens=arguments.draft_tokens, flags=arguments.flags, program=program
    )
    if arguments.dry_run:
        print(json.dumps(command) if arguments.json else shlex.join(command))
        return 0
    logger.info("%s", shlex.join(command))
    launch(command)
    return 0  # not reached: the server has taken this process's place
