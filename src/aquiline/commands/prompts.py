"""Reads prompts from arguments, a file, or standard input."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_prompts(words: Sequence[str], file: str | None) -> list[Any]:
    """Returns the prompts from arguments, a file, or standard input (all of it as one prompt).

    Args:
        words: prompts given as arguments.
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
    """Reads the text file that an option names.

    Raises:
        ValueError: if it cannot be read.
    """
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
        return sys.stdin.read()
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
