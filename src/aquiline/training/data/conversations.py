"""Reads conversations, one at a time, from files and datasets of many formats.

A source is a file (its first bytes determine the format, never its name) or the name of a dataset
that the package `datasets` can stream. Readers yield records in file order and buffer only a few,
so memory does not grow with the file. An unusable record becomes a `Refusal` with its place and the
reason; nothing is repaired silently.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

CUT = "cut off mid-record"
MALFORMED = "malformed JSON"
NO_CONVERSATION = "no conversation"
ROLES = "roles out of order"
EMPTY_TURN = "empty turn"
UNSUPPORTED = "unsupported content"
BAD_TEXT = "invalid Unicode"

LEADING_DROPPED = "leading assistant turn dropped"
TRAILING_DROPPED = "trailing user turn dropped"

_Bytes: TypeAlias = "io.BufferedReader | gzip.GzipFile"
_UNZIP_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile)

_ROLE_NAMES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
}


@dataclass(frozen=True)
class Message:
    """One turn: ``role`` is system, user or assistant; ``content`` is plain text."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """A usable record: [system], then user and assistant in turn, ending with assistant.

    `index` counts from 1: lines of a JSONL file, records of any other source. `adjusted` names the
    turns that were dropped. `finished` is False if the record says ``"finished": false``: a token
    budget cut off its last answer.
    """

    messages: tuple[Message, ...]
    source: str
    index: int
    adjusted: tuple[str, ...] = ()
    finished: bool = True


@dataclass(frozen=True)
class Refusal:
    """An unusable record: its place, the kind of reason, and details."""

    source: str
    index: int
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.source}, record {self.index}: {self.reason} ({self.detail})"


class _Unusable(Exception):
    """Raised while one record is parsed; becomes a `Refusal`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def read_conversations(source: str | Path) -> Iterator[Conversation | Refusal]:
    """Streams a source's records as conversations or refusals, in order, in constant memory.

    Understood records: ShareGPT (``conversations`` of ``from``/``value``), OpenAI style
    (``messages`` of ``role``/``content``), Alpaca style (``instruction``, ``input``,
    ``output``). Understood containers: JSON array, JSONL, one JSON object after another, all
    of these gzipped, Parquet, Arrow IPC (file or stream), and dataset names
    (``owner/name``, ``owner/name:split`` or ``owner/name:config:split``).

    A JSON or gzip source that ends in the middle of a record yields every whole record
    before it and then one refusal with the reason `CUT`.

    Raises:
        ValueError: the source is neither a file nor a loadable dataset, or its container is not
            one of the above.
    """
    name = Path(source).name if Path(source).exists() else str(source)
    for index, record in _records(source):
        if isinstance(record, _Unusable):
            yield Refusal(name, index, record.reason, record.detail)
            continue
        try:
            messages, adjusted = _parse(record)
        except _Unusable as error:
            yield Refusal(name, index, error.reason, error.detail)
        else:
            # A dropped trailing user turn proves that the answer before it was complete.
            finished = record.get("finished") is not False or TRAILING_DROPPED in adjusted
            yield Conversation(messages, name, index, adjusted, finished)


def _records(source: str | Path) -> Iterator[tuple[int, Any]]:
    """Yields (index from 1, raw record or `_Unusable`)."""
    path = Path(source)
    if not path.exists():
        yield from enumerate(_dataset_rows(str(source)), 1)
        return
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the files in it, one source each")
    with path.open("rb") as raw:
        magic = raw.read(8)
        raw.seek(0)
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
        yield 1, _Unusable(CUT, _one_line(error))
        return
    bom = head.startswith(b"\xef\xbb\xbf")
    if bom:
        stream.read(3)
    first_line = head[3 if bom else 0 :].lstrip().split(b"\n", 1)[0].strip()
    if not first_line:
        raise ValueError(f"{path} is empty; give a file with records")
    if first_line.startswith(b"["):
        yield from _streamed(stream, "item")
    elif first_line == b"{":  # pretty-printed objects, one after another
        yield from _streamed(stream, "")
    elif first_line.startswith(b"{"):
        yield from _json_lines(stream)
    else:
        raise ValueError(
            f"{path} starts with {first_line[:20]!r}, which is not JSON, gzip, Parquet or "
            "Arrow; allowed: a JSON array, JSON lines, and Parquet or Arrow files"
        )


class _Stepwise:
    """Reads a stream in small steps, so that an error does not lose the data before it."""

    def __init__(self, stream: _Bytes) -> None:
        self._stream = stream
        self.ended = False

    def read(self, size: int) -> bytes:
        data = self._stream.read1(size)
        self.ended = size > 0 and not data
        return data


def _streamed(stream: _Bytes, prefix: str) -> Iterator[tuple[int, Any]]:
    import ijson

    index = 0
    stepwise = _Stepwise(stream)
    try:
        for record in ijson.items(stepwise, prefix, multiple_values=prefix == ""):
            index += 1
            yield index, record
    except _UNZIP_ERRORS as error:
        yield index + 1, _Unusable(CUT, f"after {index} whole records: {_one_line(error)}")
    except ijson.JSONError as error:
        # The parser reports wrong input at once, and missing input only at the end.
        if stepwise.ended:
            yield index + 1, _Unusable(CUT, f"after {index} whole records")
        else:
            detail = f"{_one_line(error)}; nothing after record {index} was read"
            yield index + 1, _Unusable(MALFORMED, detail)


def _json_lines(stream: _Bytes) -> Iterator[tuple[int, Any]]:
    index = 0
    try:
        for index, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                yield index, json.loads(line)
            except (ValueError, RecursionError) as error:
                # Only the last line can lack its newline: the file was truncated there.
                reason = MALFORMED if line.endswith(b"\n") else CUT
                yield index, _Unusable(reason, _one_line(error))
    except _UNZIP_ERRORS as error:
        yield index + 1, _Unusable(CUT, f"after {index} whole lines: {_one_line(error)}")


def _arrow_rows(path: Path, magic: bytes) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if magic[:4] == b"PAR1":
        with pq.ParquetFile(path) as parquet:
            for batch in parquet.iter_batches(batch_size=256):
                yield from batch.to_pylist()
        return
    with pa.memory_map(str(path)) as mapped:
        if magic[:6] == b"ARROW1":
            reader = pa.ipc.open_file(mapped)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            batches = iter(pa.ipc.open_stream(mapped))
        for batch in batches:
            for start in range(0, batch.num_rows, 256):
                yield from batch.slice(start, 256).to_pylist()


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
        raise ValueError(f"dataset {name!r} cannot be loaded: {_one_line(error)}; {remedy}") from error
    yield from rows


def _parse(record: object) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    if not isinstance(record, Mapping):
        raise _Unusable(NO_CONVERSATION, f"the record is {_kind(record)}, not an object")
    turns = _turns(record)
    system = record.get("system")
    if isinstance(system, str) and system.strip() and (not turns or turns[0].role != "system"):
        turns.insert(0, Message("system", system))
    adjusted = []
    start = 1 if turns and turns[0].role == "system" else 0
    # ShareGPT split its long conversations, sometimes in the middle of an exchange.
    if len(turns) > start and turns[start].role == "assistant":
        del turns[start]
        adjusted.append(LEADING_DROPPED)
    if len(turns) > start + 1 and turns[-1].role == "user":
        del turns[-1]
        adjusted.append(TRAILING_DROPPED)
    _check(turns, start)
    return tuple(turns), tuple(adjusted)


def _turns(record: Mapping[str, Any]) -> list[Message]:
    for key in ("messages", "conversations", "conversation"):
        turns = record.get(key)
        if turns is None:
            continue
        if not isinstance(turns, Sequence) or isinstance(turns, str):
            raise _Unusable(NO_CONVERSATION, f"{key!r} is {_kind(turns)}, not a list")
        return [_message(turn, number) for number, turn in enumerate(turns, 1)]
    if "instruction" in record and "output" in record:
        question = _text(record["instruction"], 1)
        extra = _text(record.get("input") or "", 1)
        if extra.strip():
            question = f"{question}\n\n{extra}"
        return [Message("user", question), Message("assistant", _text(record["output"], 2))]
    keys = ", ".join(sorted(map(str, record))[:8]) or "none"
    raise _Unusable(NO_CONVERSATION, f"no 'messages', 'conversations' or 'instruction' + 'output'; keys: {keys}")


def _message(turn: object, number: int) -> Message:
    if not isinstance(turn, Mapping):
        raise _Unusable(NO_CONVERSATION, f"turn {number} is {_kind(turn)}, not an object")
    name = turn.get("role", turn.get("from"))
    role = _ROLE_NAMES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        allowed = ", ".join(sorted(_ROLE_NAMES))
        raise _Unusable(UNSUPPORTED, f"turn {number} has the role {name!r}; allowed: {allowed}")
    if turn.get("tool_calls"):
        raise _Unusable(UNSUPPORTED, f"turn {number} calls tools")
    return Message(role, _text(turn.get("content", turn.get("value")), number))


def _text(content: object, number: int) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise _Unusable(UNSUPPORTED, f"turn {number} holds parts that are not text")
        content = "".join(parts)  # type: ignore[arg-type]
    if content is None:
        raise _Unusable(EMPTY_TURN, f"turn {number} has no content")
    if not isinstance(content, str):
        raise _Unusable(UNSUPPORTED, f"turn {number}'s content is {_kind(content)}, not text")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise _Unusable(BAD_TEXT, f"turn {number} holds half a surrogate pair") from error
    return content


def _check(turns: Sequence[Message], start: int) -> None:
    if len(turns) < start + 2:
        raise _Unusable(NO_CONVERSATION, "no user turn with an answer")
    for offset, turn in enumerate(turns[start:]):
        number = start + offset + 1
        expected = ("user", "assistant")[offset % 2]
        if turn.role != expected:
            raise _Unusable(ROLES, f"turn {number} is {turn.role}, expected {expected}")
        if not turn.content.strip():
            raise _Unusable(EMPTY_TURN, f"turn {number} ({turn.role}) is empty")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
