"""The command line: parses, dispatches, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import aquiline

COMMANDS = {
    "generate": "generate text",
    "chat": "chat with a model in the terminal",
    "demo": "answer once with and once without drafts, and compare the speeds",
    "prepare": "turn conversations into a training set",
    "train": "train a draft head",
    "inspect": "explain a draft head and check that it fits a target",
    "check": "check a draft head: acceptance, forecast, diagnosis; or losslessness",
    "bench": "compare drafting methods on tasks",
    "tune": "find the fastest method and tree for your prompts",
    "export": "convert a head for another engine",
    "serve": "serve a target over OpenAI's API, or with vLLM",
    "renew": "show the versions of a renewed head, or go back to one",
    "build": "compile the CPU kernels for this machine ahead of their first use",
    "doctor": "report what this machine supports, what is slow, and why",
    "completion": "print a shell completion script",
}
"""Subcommand → what it does; each is a module of `aquiline.commands`."""

_EXTRAS = {
    "accelerate": "train",
    "datasets": "datasets",
    "llguidance": "grammar",
    "prometheus_client": "serve",
    "pyarrow": "train",
    "shtab": "completion",
    "starlette": "serve",
    "tensorboard": "train",
    "uvicorn": "serve",
}


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and a pointer to --help; exits with 2."""
        self.exit(2, f"error: {message}; see `{self.prog} --help`\n")

    def options(self) -> dict[str, str]:
        """Argument → the option that sets it."""
        named = [(option.lstrip("-").replace("-", "_"), option) for a in self._actions for option in a.option_strings]
        return dict(named) | {a.dest: a.option_strings[0] for a in self._actions if a.option_strings}


def build_parser(only: str | None = None) -> Parser:
    """Builds the parser.

    Args:
        only: add the options of this subcommand only, so that `aquiline generate` does not import
            the others; "" adds none.
    """
    parser = Parser(
        prog="aquiline", description="Lossless speculative decoding with draft heads: the same output, faster."
    )
    parser.add_argument("--version", action="version", version=f"aquiline {aquiline.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        sub.add_argument("--debug", action="store_true", help="show the traceback if an error occurs")
        sub.add_argument("--quiet", action="store_true", help="print only results and warnings")
        if only in (None, name):
            import_module(f"aquiline.commands.{name}").add(sub)
        sub.set_defaults(options=sub.options())
    return parser


def _prepare_streams() -> None:
    """Opens closed standard streams on the null device, and escapes characters that the terminal lacks."""
    if sys.stderr is None:  # print would write errors to standard output
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # Such a character would end the command.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; `argv` excludes the program's name, and None uses the arguments of the process.

    Returns:
        0 for success, also if the reader of standard output closed it early; 2 for invalid arguments or input
        files; 1 for any other failure; 130 after Ctrl-C.
    """
    if sys.stdout is None:  # `>&-`
        return _explain(ValueError("standard output is closed; redirect it to a file or to /dev/null"))
    _prepare_streams()
    # OpenMP threads spin for milliseconds between parallel regions, which starves the working thread
    # when other processes need the cores. This must be set before torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    argv = list(sys.argv[1:] if argv is None else argv)
    only = next((word for word in argv if word in COMMANDS), "")
    try:
        arguments, unknown = build_parser(only).parse_known_args(argv)
    except ModuleNotFoundError as error:  # A command's options need its packages.
        return _explain(error)
    if unknown:
        Parser(prog=f"aquiline {arguments.command}").error(f"unknown arguments: {' '.join(unknown)}")
    try:
        with _notices(arguments.quiet):
            return _run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader closed the pipe: discard the rest, including what Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if arguments.debug:
            raise
        return _explain(error, arguments.options)


def _run(arguments: argparse.Namespace) -> int:
    code = int(import_module(f"aquiline.commands.{arguments.command}").run(arguments) or 0)
    from aquiline.models.files import naming

    with naming(Path("standard output")):
        sys.stdout.flush()
    return code


class _Line(logging.Formatter):
    """One line per record; warnings and errors get a prefix."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return prefix + " ".join(record.getMessage().split())


@contextmanager
def _notices(quiet: bool) -> Iterator[None]:
    """Prints the library's log messages to standard error while a command runs."""
    logger = logging.getLogger("aquiline")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    for noisy in ("httpx", "urllib3", "transformers", "filelock"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _explain(error: Exception, options: Mapping[str, str] = MappingProxyType({})) -> int:
    """Prints an error in one line; returns 2 for bad input, 1 for a failure.

    Args:
        error: if it begins with an argument, as in "max_length is 2", the line begins with that argument's option.
        options: see `Parser.options`.
    """
    message, code = " ".join(str(error).split()) or type(error).__name__, 1
    name, _, rest = message.partition(" ")
    if name in options and rest.startswith(("is ", "has ")):
        message = f"{options[name]} {rest}"
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").split(".")[0]
        hint = f"; pip install 'aquiline[{_EXTRAS[name]}]'" if name in _EXTRAS else ""
        message = f"the package {error.name!r} is missing{hint}"
    elif isinstance(error, MemoryError) or any(
        text in message for text in ("not enough memory", "out of memory", "can't allocate memory")
    ):
        message = "out of memory; use fewer rows (--rows), a shorter context, or a smaller dtype (--dtype bfloat16)"
    elif isinstance(error, ValueError | TypeError):
        code = 2
    elif isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
        code = 2 if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR) else 1
    elif isinstance(error, RecursionError):
        message, code = "an input is nested too deeply; --debug shows where", 2
    elif not isinstance(error, RuntimeError | OSError):
        message = f"{type(error).__name__}: {message} (a bug; --debug shows where)"
    print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
