"""Records are found in files of odd shapes and sizes; no record costs more than its bound."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aquiline.training.data import sources
from aquiline.training.data.conversations import Conversation, Refusal, read_conversations
from aquiline.training.data.sources import CUT, MALFORMED, TOO_LARGE, Unusable, _Splitter, read_records

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
    splitter, found = _Splitter(), list[Any]()
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
