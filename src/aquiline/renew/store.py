"""The local store of served conversations: token ids in JSON lines, capped in size, readable by the owner alone.

Conversations lie in numbered segments of a sixteenth of the cap; the oldest segment goes when the store is full. A
line that a kill cut is left out, and every start begins a new segment.
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SEGMENTS = 16
"""Segments of a full store."""

LIMIT = 64 << 20
"""Bytes of a store: about 12 million tokens."""

_SHORTEST = 4
"""Tokens of the shortest answer that is kept: shorter ones hold no chain of drafts."""


@dataclass(frozen=True)
class Conversation:
    """A prompt with its answer.

    Attributes:
        tokens: both, as token ids.
        prompt_length: tokens of the prompt.
        time: when it ended, in seconds since the epoch.
    """

    tokens: tuple[int, ...]
    prompt_length: int
    time: float


class ConversationStore:
    """Adds conversations to a store. Threads may share it.

    Args:
        folder: made if missing, for its owner alone.
        limit: largest size in bytes.
    """

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.folder, self.limit = folder, limit
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file: int | None = None
        self._size = 0

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Appends a conversation; very short answers are left out.

        Raises:
            OSError: if it cannot be written; the store stays readable.
        """
        if len(answer) < _SHORTEST:
            return
        entry = {"time": time.time(), "prompt_length": len(prompt), "tokens": [*prompt, *answer]}
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if self._file is None or self._size + len(line) > self.limit // SEGMENTS:
                self._next_segment()
            assert self._file is not None
            written = os.write(self._file, line)
            self._size += written
            if written < len(line):  # the disk filled; the next line must not join this half
                self._end_segment()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._end_segment()

    def _end_segment(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _next_segment(self) -> None:
        """Begins a segment, after making room for it."""
        there = segments(self.folder)
        sizes = [segment.stat().st_size for segment in there]
        while there and sum(sizes) > self.limit - self.limit // SEGMENTS:
            there.pop(0).unlink()
            sizes.pop(0)
        number = int(there[-1].stem) + 1 if there else 0
        path = self.folder / f"{number:08d}.jsonl"
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._end_segment()
        self._file, self._size = made, 0


def segments(folder: Path) -> list[Path]:
    """The files of a store, oldest first; others beside them are left alone."""
    return sorted(file for file in folder.glob("*.jsonl") if re.fullmatch("[0-9]{8}", file.stem) and file.is_file())


def read_store(folder: Path) -> list[Conversation]:
    """The conversations of a store, oldest first, each once: of equal ones the first."""
    found: dict[tuple[int, ...], Conversation] = {}
    for segment in segments(folder):
        for line in segment.read_bytes().splitlines():
            try:
                entry = json.loads(line)
                tokens, length = tuple(int(token) for token in entry["tokens"]), int(entry["prompt_length"])
                each = Conversation(tokens, length, float(entry["time"]))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue  # cut by a kill or a full disk, or damaged
            if 0 < length < len(tokens):
                found.setdefault(tokens, each)
    return list(found.values())


def answer_tokens(conversations: Sequence[Conversation], since: float) -> int:
    """Tokens of the answers that ended after `since`, in seconds since the epoch."""
    return sum(len(each.tokens) - each.prompt_length for each in conversations if each.time > since)
