"""Reads prompts, and the variables and tools of their chat template."""

from __future__ import annotations

import argparse
import codecs
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add_template_options(parser: Any, *, tools: bool = True) -> None:
    """Adds the options for the chat template."""
    parser.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="variables of the chat template, like '{\"enable_thinking\": false}'",
    )
    if tools:
        parser.add_argument("--tools", metavar="FILE", help="JSON list of the tools that the chat template describes")


def template_settings(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Parses --chat-template-kwargs."""
    text = arguments.chat_template_kwargs
    if text is None:
        return None
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--chat-template-kwargs {text!r} is not JSON ({error}); give an object") from error
    if not isinstance(settings, dict):
        raise ValueError(
            f"--chat-template-kwargs is {text!r}; allowed: a JSON object like '{{\"enable_thinking\": false}}'"
        )
    return settings


def _read_tools(file: str | None) -> list[Any] | None:
    if file is None:
        return None
    try:
        tools = json.loads(read_file("--tools", file))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--tools {file!r} cannot be read ({error}); give a JSON list of tools") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"--tools {file!r} is not a list of objects; give tools in OpenAI's form")
    return tools


def template_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the template's tools and variables as arguments of `Loaded.stream` and `Loaded.chat`.

    Raises:
        ValueError: if --tools cannot be read or is not a list of objects, or the variables are not a JSON object.
    """
    return {"tools": _read_tools(arguments.tools), "chat_template_kwargs": template_settings(arguments)}


def read_prompts(words: Sequence[str], file: str | None) -> list[Any]:
    """Returns the prompts from arguments, a file, or standard input (all of it as one prompt).

    Args:
        file: one prompt per line; in a .jsonl file, a line is a JSON text, a list of messages, a list
            of token ids, or an object with "prompt" or "messages". "-" reads standard input, one
            prompt per line.

    Raises:
        ValueError: if there is no prompt, or the file cannot be read; names the line.
    """
    if words and file is not None:
        raise ValueError("prompts were given both as arguments and with --file; use one")
    if words:
        for number, word in enumerate(words, 1):
            if not word:
                raise ValueError(f"prompt {number} is empty; give a text (for an unprompted one the model's BOS token)")
        return list(words)
    if file == "-":
        return _some([line for line in _standard_input().split("\n") if line.strip()], "standard input")
    if file is not None:
        # Not `splitlines`: a U+2028 in a JSON string, or a form feed in a text, does not end a line.
        lines = read_file("--file", file).split("\n")
        kind = Path(file).suffix.lower()
        if kind == ".json":
            raise ValueError(
                f"--file {file!r} is JSON; allowed: a text file, or a .jsonl file with one JSON value per line"
            )
        numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if kind == ".jsonl":
            return _some([_json_prompt(file, number, line) for number, line in numbered], file)
        return _some([line for _, line in numbered], file)
    text = "" if sys.stdin.isatty() else _standard_input().strip()
    if not text:
        raise ValueError("no prompt; give it as an argument, with --file, or on standard input")
    return [text]


def read_file(option: str, file: str) -> str:
    """Reads the text file that an option names."""
    try:
        # Some editors start a file with a byte order mark, which is not part of the text.
        path = Path(file).expanduser()
        with path.open("rb") as stream:
            wide = stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        return path.read_text(encoding="utf-16" if wide else "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option} {file!r} cannot be read ({error}); give a UTF-8 text file") from error


def _standard_input() -> str:
    try:
        return sys.stdin.read().removeprefix("\ufeff")  # some shells' pipes begin with a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input cannot be read ({error}); give UTF-8 text") from error


def _some(prompts: list[Any], place: str) -> list[Any]:
    if not prompts:
        raise ValueError(f"{place} holds no prompt; write one per line")
    return prompts


def _json_prompt(file: str, number: int, line: str) -> Any:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}, line {number}: not JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}, line {number}: not usable JSON ({error})") from error
    if isinstance(value, dict):
        value = value.get("prompt") or value.get("messages")
    if not value or not isinstance(value, str | list):
        raise ValueError(
            f"{file}, line {number}: no prompt; allowed: a text, a list of messages, a list of token ids, or an object "
            'with "prompt" or "messages"'
        )
    return value
