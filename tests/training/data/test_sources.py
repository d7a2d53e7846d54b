"""Records are found in files of odd shapes and sizes; no record costs more than its bound."""

from __future__ import annotations

import gzip
import json
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aquiline.training.data import sources
from aquiline.training.data.conversations import Conversation, Refusal, read_conversations
from aquiline.training.data.sources import CUT, MALFORMED, TOO_LARGE, Splitter, Unusable, read_records
from tests.training.data.talks import TALKS, as_messages, as_sharegpt, contents, lines, refusals

TALK = [{"role": "user", "content": 'Say "]}" twice\\'}, {"role": "assistant", "content": "]}, ]}"}]
RECORD = {"messages": TALK}


def read(path: Path, content: str | bytes) -> list[Any]:
    """The records of a file; unusable ones as their reason."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return [record.reason if isinstance(record, Unusable) else record for _, record in read_records(path)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(JSON, min_size=1, max_size=5), st.sampled_from([None, 1]), st.integers(1, 9), st.booleans())
def test_any_cut_into_chunks_gives_the_elements(records: list[Any], indent: int | None, size: int, array: bool) -> None:
    if not array:
        records = [{"record": record} for record in records]
    parts = [json.dumps(record, indent=indent, ensure_ascii=False) for record in records]
    text = (f"[{', '.join(parts)}]" if array else "\n".join(parts)).encode()
    splitter, found = Splitter(), list[Any]()
    for start in range(0, len(text), size):
        found += splitter.feed(text[start : start + size])
    assert [json.loads(piece) for piece in found] == records
    assert splitter.depth == 0 and not splitter.lost


def test_a_list_of_messages_is_one_record(tmp_path: Path) -> None:
    path, other = tmp_path / "talks", [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    assert read(path, json.dumps(TALK) + "\n" + json.dumps(other) + "\n") == [TALK, other]
    assert read(path, json.dumps(TALK, indent=1)) == [TALK]
    assert read(path, json.dumps([TALK, other])) == [TALK, other]
    assert [len(item.messages) for item in read_conversations(path) if isinstance(item, Conversation)] == [2, 2]


def test_a_bad_element_costs_only_itself(tmp_path: Path) -> None:
    good = json.dumps(RECORD)
    bad = ["oops", '{"a": 1 2}', '{"a": "\\q"}']
    assert read(tmp_path / "a", f"[{good}, {', '.join(bad)}, {good}]") == [RECORD, *[MALFORMED] * 3, RECORD]
    [record] = read(tmp_path / "a", '[{"score": NaN, "messages": []}]')
    assert record["score"] != record["score"]
    assert read(tmp_path / "a", f"[{good}]\n[{good}]") == [RECORD, RECORD]
    assert read(tmp_path / "a", f"[{good}]]") == [RECORD, MALFORMED]
    assert read(tmp_path / "a", f"[{good}] tail") == [RECORD, MALFORMED]
    assert read(tmp_path / "a", f'[{good}, "open') == [RECORD, CUT]


def test_deep_nesting_is_refused_without_building_it(tmp_path: Path) -> None:
    deep, good = "[" * 100_000 + "]" * 100_000, json.dumps(RECORD)
    tracemalloc.start()
    assert read(tmp_path / "array", f"[{good}, {deep}, {good}]") == [RECORD, MALFORMED, RECORD]
    assert read(tmp_path / "lines", f'{good}\n{{"a": {deep}}}\n{good}') == [RECORD, MALFORMED, RECORD]
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("packed", [False, True])
def test_a_record_beyond_the_bound_is_refused_in_little_memory(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_RECORD", 1 << 18)
    good, large = json.dumps(RECORD), json.dumps({"messages": 'x"\\' * (1 << 20)})
    bombs = {"array": f"[{good}, {large}, {good}]", "lines": f"{good}\n{large}\n{good}\n"}
    for name, text in bombs.items():
        content = gzip.compress(text.encode()) if packed else text.encode()
        (tmp_path / name).write_bytes(content)
        tracemalloc.start()
        found = [r.reason if isinstance(r, Unusable) else r for _, r in read_records(tmp_path / name)]
        assert found == [RECORD, TOO_LARGE, RECORD]
        assert tracemalloc.get_traced_memory()[1] < 4_500_000
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_utf16_is_named_with_its_remedy(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "talks").write_bytes(json.dumps(RECORD).encode(encoding))
    with pytest.raises(ValueError, match=r"UTF-16; .*UTF-8"):
        list(read_records(tmp_path / "talks"))


@pytest.mark.parametrize("magic", [b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"])
def test_garbage_behind_a_magic_is_named(magic: bytes, tmp_path: Path) -> None:
    (tmp_path / "talks").write_bytes(magic + b"garbage" * 9)
    with pytest.raises(ValueError, match=r"talks is not a readable Parquet or Arrow.*fetch"):
        list(read_records(tmp_path / "talks"))


def test_refusals_of_readers_keep_their_place(tmp_path: Path) -> None:
    (tmp_path / "talks").write_text(json.dumps(RECORD) + "\n{]\n")
    _, refusal = read_conversations(tmp_path / "talks")
    assert isinstance(refusal, Refusal) and (refusal.index, refusal.reason) == (2, MALFORMED)


def write(path: Path, kind: str) -> None:
    """Writes TALKS in one container; the name does not tell which."""
    messages = [as_messages(talk) for talk in TALKS]
    sharegpt = [as_sharegpt(talk) for talk in TALKS]
    table = pa.Table.from_pylist(messages)
    if kind == "sharegpt array":
        path.write_text(json.dumps(sharegpt, indent=1), encoding="utf-8")
    elif kind == "gzipped array":
        path.write_bytes(gzip.compress(json.dumps(messages).encode()))
    elif kind == "lines":
        path.write_text(lines(messages[:2]) + "\n" + lines(sharegpt[2:]), encoding="utf-8")
    elif kind == "lines after a mark":
        path.write_bytes(b"\xef\xbb\xbf" + lines(messages).encode())
    elif kind == "gzipped lines":
        path.write_bytes(gzip.compress(lines(messages).encode()))
    elif kind == "indented objects":
        path.write_text("\n".join(json.dumps(r, indent=2) for r in messages), encoding="utf-8")
    elif kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow file":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        assert kind == "arrow stream"
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)


KINDS = [
    "sharegpt array",
    "gzipped array",
    "lines",
    "lines after a mark",
    "gzipped lines",
    "indented objects",
    "parquet",
    "arrow file",
    "arrow stream",
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_container_is_told_by_its_content(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "talks", kind)
    items = list(read_conversations(tmp_path / "talks"))
    assert refusals(items) == []
    assert contents(items) == TALKS


def test_a_cut_at_any_byte_keeps_every_whole_record(tmp_path: Path) -> None:
    records = [json.dumps(as_sharegpt(talk), ensure_ascii=False).encode() for talk in TALKS]
    whole = b"[" + b", ".join(records) + b"]"
    ends = np.cumsum([1 + len(records[0]), 2 + len(records[1]), 2 + len(records[2])])
    for size in range(1, len(whole)):
        (tmp_path / "cut.json").write_bytes(whole[:size])
        items = list(read_conversations(tmp_path / "cut.json"))
        kept = int((ends <= size).sum())
        assert contents(items) == TALKS[:kept], size
        assert refusals(items) == [(kept + 1, CUT)], size


def test_cut_lines_and_cut_gzip(tmp_path: Path) -> None:
    text = lines([as_messages(talk) for talk in TALKS]).encode()
    (tmp_path / "cut.jsonl").write_bytes(text[:-20])
    items = list(read_conversations(tmp_path / "cut.jsonl"))
    assert contents(items) == TALKS[:2]
    assert refusals(items) == [(3, CUT)]

    many = lines([as_messages(TALKS[0]) | {"noise": f"{i * 7919 % 10007}"} for i in range(2000)])
    packed = gzip.compress(many.encode())
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) * 2 // 3])
    items = list(read_conversations(tmp_path / "cut.gz"))
    assert 500 < len(contents(items)) < 2000
    assert refusals(items) == [(len(items), CUT)]


def test_a_fault_inside_an_array_is_no_cut(tmp_path: Path) -> None:
    records = [json.dumps(as_messages(talk)) for talk in TALKS]
    (tmp_path / "bad.json").write_text(f"[{records[0]}, {records[1]}, oops, {records[2]}]")
    items = list(read_conversations(tmp_path / "bad.json"))
    assert contents(items) == TALKS
    assert refusals(items) == [(3, MALFORMED)]


def test_a_malformed_line_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    good = json.dumps(as_messages(TALKS[0]))
    (tmp_path / "talks.jsonl").write_bytes(f"{good}\n{good[:-3]}\n".encode() + b"{\xff}\n" + good.encode())
    items = list(read_conversations(tmp_path / "talks.jsonl"))
    assert len(contents(items)) == 2
    assert refusals(items) == [(2, MALFORMED), (3, MALFORMED)]


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "is empty"), ("<html>", "allowed: a JSON array"), (None, "is not a file")],
)
def test_sources_that_are_none(text: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    if text is not None:
        (tmp_path / "source").write_text(text)
    with pytest.raises(ValueError, match=words):
        list(read_conversations(tmp_path / "source"))


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("owner/set", ("owner/set", None, "train")),
        ("owner/set:test", ("owner/set", None, "test")),
        ("owner/set:small:test", ("owner/set", "small", "test")),
    ],
)
def test_a_dataset_is_streamed_by_name(name: str, asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, config: str | None, *, split: str, streaming: bool) -> Any:
        assert (path, config, split) == asked
        assert streaming
        return (as_messages(talk) for talk in TALKS)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    items = list(read_conversations(name))
    assert contents(items) == TALKS
    assert items[0].source == name


def test_a_dataset_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match=r"cannot be loaded: no route to the hub; give .* path"):
        list(read_conversations("owner/set"))


def test_reading_takes_constant_memory(tmp_path: Path) -> None:
    record = json.dumps(as_messages([("user", "x" * 2000), ("assistant", "y" * 2000)]))
    peaks = []
    for count in (200, 4000):
        (tmp_path / "talks.json").write_text(f"[{', '.join([record] * count)}]")
        tracemalloc.start()
        assert sum(isinstance(item, Conversation) for item in read_conversations(tmp_path / "talks.json")) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 1_000_000  # the second file is 15 MB larger
