"""The command line: parses, dispatches, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib import import_module

import aquiline

COMMANDS = {
    "generate": "generate text",
    "chat": "talk to a model in the terminal",
    "demo": "the same words with and without speculation, and both speeds",
    "prepare": "conversations → training set",
    "train": "train a draft head",
    "inspect": "say what a draft head is and whether it fits a target",
    "bench": "compare drafting methods on tasks",
    "tune": "find the fastest method and tree for your prompts",
    "export": "write a head for another engine",
    "serve": "serve a target with its head",
    "doctor": "what this machine has, and what is slow and why",
    "completion": "print a shell completion script",
}
"""Subcommand → what it does; each is a module of `aquiline.commands`."""


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Builds the parser.

    Args:
        only: fill in this subcommand alone, so that `aquiline generate` does not import the rest.
    """
    parser = argparse.ArgumentParser(
        prog="aquiline", description="Lossless speculative decoding with draft heads: the same words, sooner."
    )
    parser.add_argument("--version", action="version", version=f"aquiline {aquiline.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        sub.add_argument("--quiet", action="store_true", help="results only, no progress or notices")
        if only in (None, name):
            import_module(f"aquiline.commands.{name}").add(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        0 for success, 1 for a failure, 2 for wrong usage (also of values).
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    only = next((word for word in argv if word in COMMANDS), None)
    arguments = build_parser(only).parse_args(argv)
    logging.basicConfig(level=logging.WARNING if arguments.quiet else logging.INFO, format="%(message)s")
    for noisy in ("httpx", "urllib3", "transformers", "filelock"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        code = import_module(f"aquiline.commands.{arguments.command}").run(arguments)
        return int(code or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # The reader of our output left: nothing more to say, and no traceback.
        return 1
    except Exception as error:
        if arguments.debug:
            raise
        return _explain(error)


def _explain(error: Exception) -> int:
    """Prints one line about an error; returns 2 for bad input, 1 for a failure."""
    if isinstance(error, ModuleNotFoundError):
        extras = {
            "pyarrow": "train",
            "ijson": "train",
            "accelerate": "train",
            "matplotlib": "bench",
            "llguidance": "grammar",
        }
        name = (error.name or "").split(".")[0]
        hint = f"; pip install 'aquiline[{extras[name]}]'" if name in extras else ""
        print(f"error: this needs the package {error.name!r}{hint}", file=sys.stderr)
        return 1
    if isinstance(error, MemoryError) or "not enough memory" in str(error) or "out of memory" in str(error):
        text = "out of memory; use a smaller batch (--rows), a shorter context, or a smaller dtype"
        print(f"error: {text}", file=sys.stderr)
        return 1
    message = " ".join(str(error).split()) or type(error).__name__
    print(f"error: {message}", file=sys.stderr)
    return 2 if isinstance(error, ValueError | TypeError) else 1


if __name__ == "__main__":
    sys.exit(main())
