"""aquiline chat: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys

from aquiline.commands.common import add_model_options, add_sampling_options, load_model, sampling_settings


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--system", help="system prompt")
    add_model_options(parser)
    add_sampling_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command: one turn for each line of standard input; an empty line or Ctrl-D ends it."""
    loaded = load_model(arguments)
    session = loaded.chat(system=arguments.system)
    settings = sampling_settings(arguments)
    interactive = sys.stdin.isatty()
    if interactive and not arguments.quiet:
        print("an empty line or Ctrl-D ends; Ctrl-C stops an answer", file=sys.stderr)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            break
        if not line:
            break
        try:
            for event in session.stream(line, **settings):
                print(event.text, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print("\n[stopped]", file=sys.stderr)
    return 0
