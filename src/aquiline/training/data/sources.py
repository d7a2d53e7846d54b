"""Reads raw records, one at a time, from files and datasets; bounds what one record may cost.

The first bytes of a file determine its format, never its name. A record that is too large, too deeply nested
or malformed becomes an `Unusable` in its place; the records around it are read.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

CUT = "cut off mid-record"
MALFORMED = "malformed JSON"
TOO_LARGE = "record too large"

MAX_RECORD = 32 << 20
"""Bytes of one JSON record; reading it takes several times as much memory."""
_MAX_DEPTH = 256

_Bytes: TypeAlias = "io.BufferedReader | gzip.GzipFile"
_UNZIP_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile)
_STRUCTURE = re.compile(rb'["\[\]{},]')
_UTF8, _UTF16 = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")


class Unusable(Exception):
    """A record that cannot be used: the kind of reason, and details."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def read_records(source: str | Path) -> Iterator[tuple[int, Any]]:
    """Yields (index from 1, raw record or `Unusable`) in the source's order, in constant memory.

    Raises:
        ValueError: the source is neither a file nor a loadable dataset, or has an unknown format.
    """
    path = Path(source)
    if not path.exists():
        yield from enumerate(_dataset_rows(str(source)), 1)
        return
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the files in it, one source each")
    with path.open("rb") as raw:
        magic = raw.peek(8)[:8]
        if magic[:4] == b"PAR1" or magic[:6] == b"ARROW1" or magic[:4] == b"\xff\xff\xff\xff":
            yield from enumerate(_arrow_rows(path, magic), 1)
        elif magic[:2] == b"\x1f\x8b":
            with gzip.open(raw) as unzipped:
                yield from _json_records(path, unzipped)
        else:
            yield from _json_records(path, raw)


def _json_records(path: Path, stream: _Bytes) -> Iterator[tuple[int, Any]]:
    try:
        head = stream.peek(1 << 16)
    except _UNZIP_ERRORS as error:
        yield 1, Unusable(CUT, one_line(error))
        return
    if head.startswith(_UTF16) or head[:2].count(0) == 1:
        raise ValueError(f"{path} is UTF-16; convert it to UTF-8 (`iconv -f UTF-16 -t UTF-8`)")
    if head.startswith(_UTF8):
        stream.read(len(_UTF8))
        head = head[len(_UTF8) :]
    first_line = head.lstrip().split(b"\n", 1)[0].strip()
    if not first_line:
        raise ValueError(f"{path} is empty; give a file with records")
    if first_line.startswith(b"{") and first_line != b"{":
        pieces = _lines(stream)
    elif first_line.startswith((b"[", b"{")):  # an array, or pretty-printed objects one after another
        pieces = enumerate(_elements(stream), 1)
    else:
        raise ValueError(
            f"{path} starts with {first_line[:20]!r}, which is not JSON, gzip, Parquet or "
            "Arrow; allowed: a JSON array, JSON lines, and Parquet or Arrow files"
        )
    for index, piece in pieces:
        yield index, piece if isinstance(piece, Unusable) else _parsed(piece)


def _parsed(piece: bytes) -> Any:
    try:
        return json.loads(piece)
    except (ValueError, RecursionError) as error:
        return Unusable(MALFORMED, one_line(error))


def _lines(stream: _Bytes) -> Iterator[tuple[int, bytes | Unusable]]:
    index = 0
    try:
        while line := stream.readline(MAX_RECORD + 1):
            index += 1
            if len(line) > MAX_RECORD:
                while line and not line.endswith(b"\n"):
                    line = stream.readline(1 << 20)
                yield index, Unusable(TOO_LARGE, f"the line has more than {MAX_RECORD:,} bytes")
            elif not line.endswith(b"\n") and isinstance(fault := _parsed(line), Unusable):
                # Only the last line can lack its newline: the file was truncated there.
                yield index, Unusable(CUT, fault.detail)
            elif line.strip():
                yield index, line
    except _UNZIP_ERRORS as error:
        yield index + 1, Unusable(CUT, f"after {index} whole lines: {one_line(error)}")


def _elements(stream: _Bytes) -> Iterator[bytes | Unusable]:
    """Splits JSON arrays of records, or records one after another, into the bytes of each record."""
    splitter = Splitter()
    try:
        while chunk := stream.read1(max(1 << 16, len(splitter.data))):
            yield from splitter.feed(chunk)
            if splitter.lost:
                return
    except _UNZIP_ERRORS as error:
        yield Unusable(CUT, f"after {splitter.count} whole records: {one_line(error)}")
        return
    if splitter.depth or splitter.open_string or (not splitter.array and splitter.data[splitter.start :].strip()):
        yield Unusable(CUT, f"after {splitter.count} whole records")
    elif splitter.data[splitter.start :].strip():
        yield Unusable(MALFORMED, f"text after the array of {splitter.count} records")


class Splitter:
    """Finds where the records of JSON text end, without building their values.

    A list of messages is one record, not an array of records. `array` is True while the records are the
    elements of arrays; `lost` if the brackets do not match.
    """

    def __init__(self) -> None:
        self.data = b""
        self.start = self.depth = self.count = 0
        self.array: bool | None = None
        self.open_string = self.lost = False
        self._at = 0
        self._fault: Unusable | None = None

    def feed(self, chunk: bytes) -> Iterator[bytes | Unusable]:
        """Yields the records that end in the next bytes."""
        self.data, self._at, self.start = self.data[self.start :] + chunk, self._at - self.start, 0
        if self.array is None:
            self.array = self.data.lstrip().startswith(b"[")
        while not self.lost and (mark := self._next_mark()):
            record = self._step(mark)
            if record is None:
                continue
            if self.array and self.count == 0 and _is_message(record):
                # The array itself is a record: scan it again from its beginning.
                self.array, self._at, self.start, self.depth = False, 0, 0, 0
                continue
            self.count += 1
            yield record
        self._shrink()

    def _next_mark(self) -> bytes | None:
        """Moves past the next bracket or comma outside strings and returns it; None without one."""
        while True:
            while self.open_string:
                quote = self.data.find(b'"', self._at)
                if quote < 0:
                    return None
                text = self.data[self._at : quote]
                self._at = quote + 1
                self.open_string = bool((len(text) - len(text.rstrip(b"\\"))) % 2)
            token = _STRUCTURE.search(self.data, self._at)
            if token is None:
                return None
            self._at = token.end()
            if token[0] != b'"':
                return token[0]
            self.open_string = True

    def _step(self, mark: bytes) -> bytes | Unusable | None:
        """Moves over a structural character; returns the record that ends there."""
        level = 1 if self.array else 0
        if mark in b"[{":
            self.depth += 1
            if self.array and self.depth == 1:
                self.lost = mark == b"{"
                # The first array is kept until its first element shows what it holds.
                self.start = self._at if self.count else self.start
                return (
                    Unusable(MALFORMED, "an object after the array; nothing after it was read") if self.lost else None
                )
            if self.depth > _MAX_DEPTH:
                self._fault = self._fault or Unusable(MALFORMED, f"nested more than {_MAX_DEPTH} levels deep")
            return None
        if mark in b"]}":
            self.depth -= 1
            if self.depth == level:
                return self._take(self._at)
            if self.depth < 0:
                self.lost = True
                return Unusable(MALFORMED, "unmatched bracket; nothing after it was read")
        if self.depth == level - (mark == b"]") and mark in b",]" and self.array:
            record = self._take(self._at - 1)
            self.start = self._at
            return record
        return None

    def _take(self, end: int) -> bytes | Unusable | None:
        """Returns the bytes from the last record to `end`, or why they are not a record; None if blank."""
        piece = self.data[self.start : end].strip()
        if self.array and self.count == 0:
            piece = piece.removeprefix(b"[").strip()
        fault, self._fault = self._fault, None
        self.start = self._at
        return fault or piece or None

    def _shrink(self) -> None:
        """Drops a record that grew too large, keeping whether its end lies inside a string."""
        if len(self.data) - self.start <= MAX_RECORD:
            return
        self._fault = Unusable(TOO_LARGE, f"it has more than {MAX_RECORD:,} bytes")
        tail = self.data[self._at :] if self.open_string else b""
        self.data = b"\\" * ((len(tail) - len(tail.rstrip(b"\\"))) % 2)
        self._at = self.start = 0


def _is_message(record: bytes | Unusable) -> bool:
    """True for an object with a role: one turn, not a whole conversation."""
    value = None if isinstance(record, Unusable) else _parsed(record)
    return (
        isinstance(value, Mapping)
        and bool({"role", "from"} & value.keys())
        and not {"messages", "conversations", "conversation"} & value.keys()
    )


def _arrow_rows(path: Path, magic: bytes) -> Iterator[dict[str, Any]]:
    import pyarrow as pa

    try:
        for batch in _arrow_batches(path, magic):
            for start in range(0, batch.num_rows, 256):
                yield from batch.slice(start, 256).to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not a readable Parquet or Arrow file ({one_line(error)}); fetch it again"
        ) from error


def _arrow_batches(path: Path, magic: bytes) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if magic[:4] == b"PAR1":
        with pq.ParquetFile(path) as parquet:
            yield from parquet.iter_batches(batch_size=256)
        return
    with pa.memory_map(str(path)) as mapped:
        if magic[:6] == b"ARROW1":
            reader = pa.ipc.open_file(mapped)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            yield from pa.ipc.open_stream(mapped)


def _dataset_rows(name: str) -> Iterator[dict[str, Any]]:
    remedy = "give an existing path, or for a dataset name install `datasets` and go online"
    try:
        from datasets import load_dataset  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ValueError(f"source {name!r} is not a file; {remedy}") from error
    dataset, *rest = name.split(":")
    config = rest[0] if len(rest) == 2 else None
    split = rest[-1] if rest else "train"
    try:
        rows = load_dataset(dataset, config, split=split, streaming=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"dataset {name!r} cannot be loaded: {one_line(error)}; {remedy}") from error
    yield from rows


def one_line(error: Exception) -> str:
    """Returns an error's message, or its type, in one short line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
