"""aquiline completion: prints a shell completion script."""

from __future__ import annotations

import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="e.g. aquiline completion bash > ~/.aquiline.sh")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    import shtab

    from aquiline.cli import build_parser

    print(shtab.complete(build_parser(), arguments.shell))
    return 0
