"""An append-only file of JSON records that survives a kill at any moment."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aquiline.models.files import append_whole


class RecordLog:
    """JSON lines with an ``id``, each written by one system call.

    Opening an existing file drops a last line without a newline, the only trace that a kill or a
    full disk can leave. Threads may share a log.

    Args:
        path: the file; created if missing.

    Raises:
        ValueError: if a line is not a JSON object with an ``id``; the file is then unchanged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ids: set[str] = set()
        whole = 0
        if path.exists():
            for line in _whole_lines(path):
                self.ids.add(_id(path, line, len(self.ids) + 1))
                whole += len(line)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._file, whole)
        self._lock = threading.Lock()

    def __enter__(self) -> RecordLog:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a record; it is on disk when this returns.

        Raises:
            OSError: if it could not be written completely; the written part is removed.
        """
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            append_whole(self._file, self.path, line)
            self.ids.add(record["id"])


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        for line in stream:
            if line.endswith(b"\n"):
                yield line


def _id(path: Path, line: bytes, number: int) -> str:
    try:
        record = json.loads(line)
        found = record["id"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}, line {number} is not a record of an earlier run ({type(error).__name__}); "
            "repair or remove the line, or choose another output"
        ) from error
    return str(found)
