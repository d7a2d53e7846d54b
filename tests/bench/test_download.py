"""Questions from a hub, with records of the shapes that the data sets have."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aquiline.bench.download import HUB_TASKS, download_questions
from aquiline.bench.tasks import load_questions
from tests.command_line import call

RECORDS: dict[str, dict[str, Any]] = {
    "HuggingFaceH4/mt_bench_prompts": {"category": "writing", "prompt": ["Write.", "Again."]},
    "openai/openai_humaneval": {"prompt": "def f():\n"},
    "openai/gsm8k": {"question": "How many?", "answer": "2"},
    "tatsu-lab/alpaca": {"instruction": "Name one.", "input": "Colours"},
    "abisee/cnn_dailymail": {"article": "It rained."},
    "google-research-datasets/nq_open": {"question": "who was first", "answer": ["x"]},
    "wmt/wmt14": {"translation": {"de": "Guten Tag", "en": "Good day"}},
}


def fake_hub(name: str, subset: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
    assert streaming and split
    while True:  # a stream without end: only what is asked for may be read
        yield RECORDS[name]


def test_files_are_written_once_and_read_back(tmp_path: Path) -> None:
    files = download_questions(tmp_path / "hub", count=3, load=fake_hub)
    assert [file.stem for file in files] == list(HUB_TASKS)
    questions = load_questions([tmp_path / "hub"])
    assert len(questions) == 3 * len(HUB_TASKS)
    turns = {q.task: q.turns for q in questions}
    assert turns["mt_bench"] == ("Write.", "Again.")
    assert turns["alpaca"] == ("Name one.\nColours",)
    assert turns["qa"] == ("Who was first?",)
    assert turns["sum"] == ("Summarize: It rained.",)
    assert turns["translation"] == ("Translate German to English: Guten Tag",)
    files[0].write_text("mine")
    download_questions(tmp_path / "hub", ["MT-bench"], load=fake_hub)
    assert files[0].read_text() == "mine"


def test_refusals(tmp_path: Path) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route")

    with pytest.raises(RuntimeError, match=r"openai/gsm8k.*no route.*network"):
        download_questions(tmp_path, ["gsm8k"], load=unreachable)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"'rag'.*mt_bench"):
        download_questions(tmp_path, ["rag"], load=fake_hub)
    with pytest.raises(ValueError, match="count is 0"):
        download_questions(tmp_path, count=0, load=fake_hub)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fake_hub))
    folder = tmp_path / "hub"
    words = ("bench", "--download", folder, "--tasks", "gsm8k", "qa", "--per-task", 2)
    result = call(capsys, *words, "--json")
    assert result.code == 0
    assert json.loads(result.out) == [str(folder / "gsm8k.jsonl"), str(folder / "qa.jsonl")]
    assert len(load_questions([folder])) == 4
    assert call(capsys, *words).out.split() == json.loads(result.out)  # kept: nothing is fetched again


def test_the_command_without_the_package_or_a_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", None)
    result = call(capsys, "bench", "--download", tmp_path)
    assert result.code == 1 and result.out == "" and 'pip install "aquiline[datasets]"' in result.error
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    result = call(capsys, "bench", "--download", tmp_path)
    assert result.code == 1 and "from the hub (no route); check the network" in result.error
