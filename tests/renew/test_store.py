"""The store of conversations: private, capped, and readable after a kill."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from aquiline.renew.store import ConversationStore, answer_tokens, read_store, segments


def test_conversations_come_back_in_order_and_once(tmp_path: Path) -> None:
    for _ in range(2):  # a second start begins a new segment
        store = ConversationStore(tmp_path / "kept")
        store.add([1, 2], [3, 4, 5, 6])
        store.add([7], [8, 9, 10, 11])
        store.add([7], [8, 9])  # holds no chain of drafts
        store.close()
    found = read_store(tmp_path / "kept")
    assert [(each.tokens, each.prompt_length) for each in found] == [((1, 2, 3, 4, 5, 6), 2), ((7, 8, 9, 10, 11), 1)]
    assert len(segments(tmp_path / "kept")) == 2 and found[0].time <= found[1].time


def test_only_the_owner_reads_it(tmp_path: Path) -> None:
    store = ConversationStore(tmp_path / "kept")
    store.add([1], [2, 3, 4, 5])
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in segments(tmp_path / "kept")] == [0o600]


def test_the_oldest_conversations_go_first(tmp_path: Path) -> None:
    limit = 16_000
    store = ConversationStore(tmp_path, limit)
    for number in range(1_000):
        store.add([number], [5] * 20)
        assert sum(file.stat().st_size for file in segments(tmp_path)) <= limit
    firsts = [each.tokens[0] for each in read_store(tmp_path)]
    assert firsts == list(range(1_000 - len(firsts), 1_000)) and len(firsts) > 100


@pytest.mark.parametrize(
    "damage",
    [
        b'{"time":1,"prompt', b"\xff\xfe\n", b'{"time":1}\n', b'{"time":1,"prompt_length":9,"tokens":[1]}\n',
        b"[" * 100_000, b'{"time":1,"prompt_length":1,"tokens":[1e999,2]}\n',
        b'{"time":1,"prompt_length":1,"tokens":[NaN,2]}\n',
    ],
)  # fmt: skip
def test_damaged_lines_are_left_out(tmp_path: Path, damage: bytes) -> None:
    store = ConversationStore(tmp_path)
    store.add([1], [2, 3, 4, 5])
    (file,) = segments(tmp_path)
    file.write_bytes(file.read_bytes() + damage)
    (tmp_path / "0notes.jsonl").write_text("no segment")
    (tmp_path / "00000001.jsonl").mkdir()
    assert [each.tokens for each in read_store(tmp_path)] == [(1, 2, 3, 4, 5)]


def test_a_line_that_a_full_disk_cuts_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, write = ConversationStore(tmp_path), os.write
    store.add([1], [2, 3, 4, 5])
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))
    with pytest.raises(OSError, match=str(tmp_path)):
        store.add([6], [7, 8, 9, 10])
    monkeypatch.setattr(os, "write", write)
    store.add([11], [12, 13, 14, 15])
    assert [each.tokens for each in read_store(tmp_path)] == [(1, 2, 3, 4, 5), (11, 12, 13, 14, 15)]


def test_answers_since_the_last_candidate_are_counted(tmp_path: Path) -> None:
    store = ConversationStore(tmp_path)
    store.add([1, 2], [3, 4, 5, 6])
    store.add([7], [8, 9, 10, 11, 12])
    store.add([1, 2], [3, 4, 5, 6])
    first, second = read_store(tmp_path)
    assert answer_tokens([first, second], 0.0) == 9
    assert answer_tokens([first, second], first.time) == 5, "a repeated answer is as old as its first"
    assert answer_tokens([first, second], second.time) == answer_tokens([], 0.0) == 0
