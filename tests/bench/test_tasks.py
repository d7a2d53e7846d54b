"""Question files: formats, selection, and every rejected file."""

import json
from pathlib import Path

import pytest

from aquiline.bench.tasks import EMBEDDED, load_questions, task_name


def write(path: Path, records: list[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_embedded_set_covers_the_six_tasks_with_two_turns_for_mt_bench() -> None:
    questions = load_questions()
    counts = {task: sum(q.task == task for q in questions) for task in dict.fromkeys(q.task for q in questions)}
    assert counts == dict.fromkeys(("mt_bench", "humaneval", "gsm8k", "alpaca", "sum", "qa"), 5)
    assert all(len(q.turns) == (2 if q.task == "mt_bench" else 1) for q in questions)
    assert sorted(path.suffix for path in EMBEDDED.iterdir()) == [".jsonl"] * 6


def test_a_folder_in_either_layout_and_names_of_the_papers(tmp_path: Path) -> None:
    write(tmp_path / "gsm8k.jsonl", [{"question_id": 4, "turns": ["How many?"]}])
    write(tmp_path / "mt_bench" / "question.jsonl", [{"question_id": 81, "turns": ["First.", "Second."]}])
    questions = load_questions([tmp_path])
    assert [(q.task, q.id, q.turns) for q in questions] == [
        ("mt_bench", "81", ("First.", "Second.")),
        ("gsm8k", "4", ("How many?",)),
    ]
    assert [q.task for q in load_questions([tmp_path], tasks=["MT-bench"])] == ["mt_bench"]
    assert task_name("CNN/DM") == "sum"


def test_spec_bench_file_is_told_apart_by_category(tmp_path: Path) -> None:
    records = [
        {"question_id": 1, "category": "roleplay", "turns": ["a", "b"]},
        {"question_id": 2, "category": "summarization", "turns": ["c"]},
        {"question_id": 3, "category": "math_reasoning", "turns": ["d"]},
    ]
    file = write(tmp_path / "spec_bench" / "question.jsonl", records)
    assert [(q.task, q.id) for q in load_questions([file])] == [("mt_bench", "1"), ("gsm8k", "3"), ("sum", "2")]
    write(file, [{"question_id": 1, "category": "astrology", "turns": ["a"]}])
    with pytest.raises(ValueError, match=r"line 1: .*'astrology'.*writing"):
        load_questions([file])


def test_user_prompts_as_text_or_json(tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("One prompt.\n\nAnother.\n", encoding="utf-8")
    lines = write(tmp_path / "other.jsonl", [{"prompt": "Third."}])
    questions = load_questions([text, lines])
    assert [(q.task, q.id, q.turns) for q in questions] == [
        ("mine", "1", ("One prompt.",)),
        ("mine", "3", ("Another.",)),
        ("other", "1", ("Third.",)),
    ]


def test_a_smaller_number_is_spread_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "qa.jsonl", [{"question_id": i, "turns": [str(i)]} for i in range(40)])
    assert [q.id for q in load_questions([file], per_task=4)] == ["0", "10", "20", "30"]
    assert len(load_questions([file], per_task=99)) == 40


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", r"line 2: not JSON"),
        ("[1]", r"line 2: expected an object with turns, got list"),
        ('{"question_id": 2}', r"line 2: the record has neither turns nor prompt"),
        ('{"turns": []}', r"line 2: turns must be a list"),
        ('{"turns": ["a", 3]}', r"line 2: turns must be a list"),
        ('{"turns": [" "]}', r"line 2: turns must be a list"),
        ('{"question_id": 1, "turns": ["again"]}', r"line 2: question_id 1 occurs twice"),
        ('{"turns": ["half a pair: \\ud800"]}', r"line 2: .*half a surrogate pair .*remove"),
        ("[" * 100_000, r"line 2: not "),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "qa.jsonl"
    file.write_text('{"question_id": 1, "turns": ["good"]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=reason):
        load_questions([file])


def test_invalid_utf8_is_named_and_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "qa.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"turns": ["good"]}\r\n{"turns": ["\xff"]}\n')
    with pytest.raises(ValueError, match=r"qa.jsonl, line 2: .*can't decode byte 0xff"):
        load_questions([file])
    file.write_bytes(b'\xef\xbb\xbf{"turns": ["good"]}\r\n')
    assert [q.turns for q in load_questions([file])] == [("good",)]


def test_one_question_in_two_files_is_rejected(tmp_path: Path) -> None:
    first = write(tmp_path / "a" / "qa.jsonl", [{"question_id": 1, "turns": ["Which?"]}])
    second = write(tmp_path / "b" / "qa.jsonl", [{"question_id": 1, "turns": ["Another."]}])
    with pytest.raises(ValueError, match=r"question 1 of task qa is in .*a/qa.jsonl and in .*b/qa.jsonl.*rename"):
        load_questions([first, second])
    other = write(tmp_path / "b" / "mine.jsonl", [{"question_id": 1, "turns": ["Another."]}])
    assert [q.task for q in load_questions([first, other])] == ["qa", "mine"]


def test_an_unknown_task_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'mmlu'.*mt_bench, humaneval, gsm8k"):
        load_questions(tasks=["mmlu"])


def test_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"no questions.*give"):
        load_questions([tmp_path / "empty.jsonl"])
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match=r"no question file.*TASK"):
        load_questions([tmp_path / "void"])
    with pytest.raises(ValueError, match="neither a folder nor a file"):
        load_questions([tmp_path / "missing"])
    with pytest.raises(ValueError, match=r"per task is 0.*≥ 1"):
        load_questions(per_task=0)
