"""aquiline serve: serves a target and its head with another engine."""

from __future__ import annotations

import argparse
import json
import logging
import shlex

from aquiline.commands.common import add_target_option

logger = logging.getLogger("aquiline")


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags for the engine's server")
    parser.add_argument("--engine", help="the server to start; allowed: vllm")
    add_target_option(parser)
    parser.add_argument(
        "--draft", default="auto", help="head: auto, shipped name, folder, GGUF file, hub id (default: auto)"
    )
    parser.add_argument("--draft-tokens", type=int, default=3, help="length of the draft chains (default: 3)")
    parser.add_argument(
        "--dry-run", action="store_true", help="run all checks, then print the command instead of starting it"
    )
    parser.add_argument("--json", action="store_true", help="with --dry-run: print the command as a JSON list")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; with a server, it does not return."""
    if arguments.engine != "vllm":
        raise ValueError(
            f"--engine is {arguments.engine!r}; allowed: vllm. Aquiline does not have its own server yet: use "
            "--engine vllm, or `aquiline generate --file` or the Python API for batches"
        )
    if arguments.json and not arguments.dry_run:
        raise ValueError("--json has no effect without --dry-run; add --dry-run")
    from aquiline.checkpoints.open import shipped_for
    from aquiline.models.resolve import resolve_target
    from aquiline.serve.vllm import launch, vllm_command

    target = resolve_target(arguments.target, logger.info)
    heads = shipped_for(target) if arguments.draft == "auto" else [arguments.draft]
    if not heads:
        raise ValueError(
            f"no shipped head was trained for {arguments.target}; give one with --draft, or train it: "
            f"`aquiline train DATA --target {arguments.target} --output FOLDER`"
        )
    # A dry run does not require vLLM: the command may be meant for another machine.
    program = "vllm" if arguments.dry_run else None
    command = vllm_command(
        target, heads[0], num_draft_tokens=arguments.draft_tokens, flags=arguments.flags, program=program
    )
    if arguments.dry_run:
        print(json.dumps(command) if arguments.json else shlex.join(command))
        return 0
    logger.info("%s", shlex.join(command))
    launch(command)
    return 0  # not reached: the server has replaced this process
