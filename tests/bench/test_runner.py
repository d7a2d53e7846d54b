"""The whole run: its files, resuming after a kill, and rejected settings."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aquiline.bench import measure as measuring
from aquiline.bench import runner
from aquiline.bench.agreement import WrongTokens
from aquiline.bench.contexts import in_contexts
from aquiline.bench.methods import METHODS, Bed, Method, check_methods, make_method, parse_method
from aquiline.bench.runner import run_bench
from aquiline.bench.settings import PRESETS, BenchSettings
from aquiline.bench.tasks import load_questions
from aquiline.drafters.adaptive import Adaptive
from aquiline.drafters.trees import Chain, DynamicTree
from tests.bench.scripted import path_bed

QUESTIONS = [
    {"question_id": 1, "turns": ["abcabcabc", "again abcabc"]},
    {"question_id": 2, "turns": ["the cat the cat", "the dog the dog"]},
    {"question_id": 3, "turns": ["one two one two", "three"]},
]


@pytest.fixture(name="questions")
def _questions(tmp_path: Path) -> Path:
    folder = tmp_path / "questions"
    folder.mkdir()
    for name, records in (("mt_bench", QUESTIONS), ("qa", [{"question_id": 7, "turns": ["Which? Which? Which?"]}])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def settings(questions: Path, output: Path, **changes: Any) -> BenchSettings:
    given: dict[str, Any] = {
        "methods": ("prompt-lookup", "prompt-lookup:num_branches=2"),
        "try_methods": (),
        "questions": (str(questions),),
        "max_new_tokens": 24,
        "batch_sizes": (1, 2),
        "cost_curve": False,
        "output": str(output),
    }
    return BenchSettings(**(given | changes))


TIMES = {"seconds", "first_token_seconds", "gaps", "phases", "memory"}


def without_times(results: dict[str, Any]) -> dict[str, Any]:
    """The part of the results that a run's speed cannot change."""
    kept = {k: results[k] for k in ("settings", "methods", "questions", "skipped", "agreement", "divergences")}
    kept["records"] = [{k: v for k, v in r.items() if k not in TIMES} for r in results["records"]]
    kept["summary"] = [
        {k: c.get(k) for k in ("method", "task", "batch", "prompts", "tokens", "tau", "alpha", "acceptance_by_depth")}
        for c in results["summary"]
    ]
    return kept


def test_a_run_writes_every_record_and_report(questions: Path, tmp_path: Path) -> None:
    chosen = settings(questions, tmp_path / "out", temperatures=(0.0, 1.0), cost_curve=True)
    report = run_bench(chosen, path_bed(), quiet=True)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results == json.loads(json.dumps(report.results))
    assert (tmp_path / "out" / "results.md").read_text() == report.markdown
    # 3 questions of 2 turns and 1 of one, and batches of 2 over the first turns of 3; 2 temperatures;
    # plain twice and two methods.
    assert len(results["records"]) == (3 * 2 + 1 + 2) * 2 * 4
    assert {r["batch"] for r in results["records"]} == {1, 2}
    assert {tuple(r["questions"]) for r in results["records"] if r["batch"] == 2} == {("1", "2"), ("3", "1")}
    assert results["divergences"] == [] and all(c["equal"] == c["outputs"] for c in results["agreement"])
    assert any(r["accepted"] for r in results["records"])
    assert results["environment"]["plain_spread"]["pairs"] == 18
    assert results["cost_curve"][0]["tokens"] == 1


def test_second_turns_hold_plain_decodings_first_answer(questions: Path, tmp_path: Path) -> None:
    bed = path_bed()
    results = run_bench(settings(questions, tmp_path / "out", batch_sizes=(1,)), bed, quiet=True).results
    firsts = [r for r in results["records"] if r["questions"] == ["1"] and r["turn"] == 0]
    plain = next(r for r in firsts if r["method"] == "plain")
    answer = bed.tokenizer.decode(plain["outputs"][0], skip_special_tokens=True).strip()
    expected = len(
        bed.tokenizer.apply_chat_template(
            [
                {"role": "user", "content": QUESTIONS[0]["turns"][0]},
                {"role": "assistant", "content": answer},
                {"role": "user", "content": QUESTIONS[0]["turns"][1]},
            ],
            add_generation_prompt=True,
        )["input_ids"]
    )
    seconds = [r["prompt_tokens"] for r in results["records"] if r["questions"] == ["1"] and r["turn"] == 1]
    assert seconds == [[expected]] * 4


def test_questions_stand_behind_long_texts(questions: Path, tmp_path: Path) -> None:
    bed = path_bed()
    chosen = settings(questions, tmp_path / "out", batch_sizes=(1,), contexts=(0, 120, 160))
    report = run_bench(chosen, bed, quiet=True)
    tasks = [f"{task}{at}" for at in ("", "@120", "@160") for task in ("mt_bench", "qa")]
    assert list(report.results["questions"]) == tasks
    for record in report.results["records"]:
        length = record["task"].partition("@")[2]
        if length:
            assert int(length) - 64 < record["prompt_tokens"][0] <= int(length) and record["turn"] == 0
    assert all(cell["equal"] == cell["outputs"] for cell in report.results["agreement"])
    cells = {(cell["method"], cell["task"]): cell for cell in report.results["summary"]}
    for task, shown in (("mt_bench@120", "MT-bench, 120 tokens"), ("qa@160", "Natural Questions, 160 tokens")):
        [row] = [line for line in report.markdown.splitlines() if line.startswith(f"| {shown} |")]
        cell = cells["prompt-lookup", task]
        assert f"{cell['decode_speedup_vs_plain']['median']:.2f}x / {cell['tau']['value']:.2f}" in row
    assert cells["plain", "qa"]["decode_speedup_vs_plain"]["median"] == pytest.approx(1, rel=0.5)


def test_the_texts_before_a_question_are_those_of_the_others(questions: Path) -> None:
    tokenizer, asked = path_bed().tokenizer, load_questions([questions])
    [behind] = [q for q in in_contexts(asked, (130,), tokenizer) if (q.task, q.id) == ("mt_bench@130", "2")]
    # From the question after it on, then around; 130 less 64 for a template and 15 for the question.
    filling = "one two one two\n\nWhich? Which? Which?\n\nabcabcabc\n\none two"[:51]
    assert behind.turns == (f"{filling}\n\nthe cat the cat",)
    assert in_contexts(asked, (10,), tokenizer)[0].turns == ("abcabcabc",), "longer than 10 tokens: alone"
    with pytest.raises(ValueError, match="one question"):
        in_contexts(asked[:1], (130,), tokenizer)


def test_references_take_turns_where_asked(questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hf_as_plain(bed: Bed, method: Any, case: Any, repeat: int = 0) -> Any:
        return dataclasses.replace(measuring.measure(bed, method, case, repeat), method=method.label)

    hf = Method("hf", None, "stands for transformers")
    made = runner.make_method
    monkeypatch.setattr(runner, "measure", hf_as_plain)
    monkeypatch.setattr(runner, "make_method", lambda spec, bed: hf if spec.name == "hf" else made(spec, bed))
    chosen = settings(questions, tmp_path / "out", methods=("hf", "prompt-lookup"), reference_every=2)
    results = run_bench(chosen, path_bed(), quiet=True).results
    ran = {
        (r["method"], r["repeat"], r["batch"], r["task"], "+".join(r["questions"]), r["turn"])
        for r in results["records"]
    }
    turns = {(task, i, turn) for task, i, n in (("mt_bench", "2", 2), ("qa", "7", 1)) for turn in range(n)}
    others = {("mt_bench", i, turn) for i in "13" for turn in range(2)}
    for who, expected in ((("plain", 0), turns | others), (("prompt-lookup", 0), turns | others)):
        assert {r[3:] for r in ran if r[:3] == (*who, 1)} == expected
    assert {r[3:] for r in ran if r[:3] == ("plain", 1, 1)} == turns
    assert {r[3:] for r in ran if r[:3] == ("hf", 0, 1)} == others
    assert {r[:2] for r in ran if r[2] == 2} == {("plain", 0), ("plain", 1), ("hf", 0), ("prompt-lookup", 0)}
    assert results["environment"]["plain_spread"]["pairs"] == 3 + 2
    whole = {c["method"]: c for c in results["summary"] if (c["task"], c["batch"]) == ("all", 1)}
    assert whole["prompt-lookup"]["speedup_vs_plain"] and whole["prompt-lookup"]["speedup_vs_hf"]
    single = {c["method"]: c for c in results["summary"] if (c["task"], c["batch"]) == ("qa", 1)}
    assert single["prompt-lookup"]["speedup_vs_hf"] is None


class Killed(BaseException):
    """Stands for the signal that ends a process."""


def killed_after(count: int) -> Callable[..., Any]:
    """`measure` that dies at its `count`-th call."""
    calls = iter(range(count))

    def stand_in(*arguments: Any, **named: Any) -> Any:
        if next(calls, None) is None:
            raise Killed
        return measuring.measure(*arguments, **named)

    return stand_in


@pytest.mark.parametrize("calls", [9, 30])
def test_killed_and_resumed_equals_uninterrupted(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    whole = run_bench(settings(questions, tmp_path / "whole"), path_bed(), quiet=True)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "measure", killed_after(calls))
        with pytest.raises(Killed):
            run_bench(settings(questions, tmp_path / "cut"), path_bed(), quiet=True)
    log = tmp_path / "cut" / "records.jsonl"
    kept = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    log.write_bytes(log.read_bytes() + b'{"kind": "record", "method": "pl')  # killed in the middle of a write
    resumed = run_bench(settings(questions, tmp_path / "cut"), path_bed(), quiet=True)
    assert without_times(resumed.results) == without_times(whole.results)
    # What was measured before the kill was not measured again.
    for entry in kept:
        if entry.pop("kind") == "record":
            assert entry in resumed.results["records"]


def test_a_folder_with_another_run_is_rejected(questions: Path, tmp_path: Path) -> None:
    run_bench(settings(questions, tmp_path / "out", batch_sizes=(1,)), path_bed(), quiet=True)
    with pytest.raises(ValueError, match=r"max_new_tokens: 24 → 25.*another output folder"):
        run_bench(settings(questions, tmp_path / "out", batch_sizes=(1,), max_new_tokens=25), path_bed(), quiet=True)


def test_prompts_over_the_context_are_skipped_and_counted(questions: Path, tmp_path: Path) -> None:
    bed = path_bed(max_positions=64)
    results = run_bench(settings(questions, tmp_path / "out", batch_sizes=(1,)), bed, quiet=True).results
    assert {(s["question"], s["turn"]) for s in results["skipped"]} >= {("1", 1), ("2", 1)}
    measured = {(r["task"], *r["questions"], r["turn"]) for r in results["records"]}
    assert not measured & {(s["task"], s["question"], s["turn"]) for s in results["skipped"]}
    assert all(r["prompt_tokens"][0] + 24 <= 64 for r in results["records"])
    assert f"{len(results['skipped'])} prompts" in (tmp_path / "out" / "results.md").read_text()
    with pytest.raises(ValueError, match=r"none of 4.*lower"):
        run_bench(settings(questions, tmp_path / "none", max_new_tokens=60), bed, quiet=True)


def test_a_long_question_leaves_the_others_their_batch(questions: Path, tmp_path: Path) -> None:
    lines = [{"question_id": 9, "turns": ["x" * 200]}, *QUESTIONS]
    (questions / "mt_bench.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    bed = path_bed(max_positions=90)
    results = run_bench(settings(questions, tmp_path / "out"), bed, quiet=True).results
    assert {tuple(r["questions"]) for r in results["records"] if r["batch"] == 2} == {("1", "2"), ("3", "1")}
    assert [s["question"] for s in results["skipped"] if s["turn"] == 0] == ["9"]
    (questions / "mt_bench.jsonl").write_text(json.dumps(lines[0]) + "\n")
    chosen = settings(questions, tmp_path / "short")
    results = run_bench(chosen, bed, quiet=True).results
    assert {r["batch"] for r in results["records"]} == {1}
    assert "Speedup by batch size" not in (tmp_path / "short" / "report.html").read_text()


def test_a_wrong_token_fails_loudly_after_the_report(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def buggy(bed: Bed, method: Any, case: Any, repeat: int = 0) -> Any:
        record = measuring.measure(bed, method, case, repeat)
        if method.label == "prompt-lookup" and case.questions == ("2",) and case.turn == 0:
            record.outputs[0][3] = (record.outputs[0][3] + 1) % 50
        return record

    monkeypatch.setattr(runner, "measure", buggy)
    with pytest.raises(WrongTokens, match=r"prompt-lookup.*question 2 turn 0.*token 3"):
        run_bench(settings(questions, tmp_path / "out", batch_sizes=(1,)), path_bed(), quiet=True)
    assert "NOT a near-tie" in (tmp_path / "out" / "report.html").read_text()


def test_methods_are_parsed() -> None:
    spec = parse_method("eagle3:dynamic:12,3,4,0.1")
    assert (spec.name, spec.tree, spec.settings) == ("eagle3", DynamicTree(12, 3, 4, 0.1), {})
    assert parse_method("prompt-lookup:depth=3:max_ngram=2").settings == {"depth": 3, "max_ngram": 2}
    assert [s.label for s in check_methods(["hf", "plain", "auto"])] == ["plain", "hf", "auto"]
    assert [s.label for s in check_methods(["auto"])] == ["plain", "auto"]
    assert all(parse_method(m).name in METHODS for p in PRESETS.values() for m in p.get("try_methods", ()))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("eagle9", "unknown method 'eagle9'; allowed: plain, hf, auto"),
        ("eagle3:bush", "'bush' is neither a tree nor a file; allowed: chain"),
        ("eagle3:chain:1_0", "'chain:1_0' is not a tree; allowed: chain"),
        ("lookahead:window=many", "window is 'many'; allowed: an integer"),
        ("lookahead:window=1_0", "window is '1_0'; allowed: an integer"),
        ("eagle3:chain:depth=4", "depth is not a setting of eagle3; allowed: a tree, as in eagle3:chain:4"),
        ("plain:chain", "plain takes no tree; give plain alone"),
        ("plain:depth=3", "depth is not a setting of plain; allowed: plain alone"),
        ("hf:threads=1", "threads is not a setting of hf"),
        ("prompt-lookup:depth=3:depth=4", "depth is given twice"),
    ],
)
def test_unknown_methods(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_method(text)
    with pytest.raises(ValueError, match="given twice"):
        check_methods(["hf", "hf"])


def test_a_missing_head_names_the_command_that_trains_it(questions: Path, tmp_path: Path) -> None:
    wanted = "aquiline train DATA --method medusa --target path --output FOLDER"
    with pytest.raises(ValueError, match=wanted):
        make_method(parse_method("medusa"), path_bed())
    with pytest.raises(ValueError, match=wanted):
        run_bench(settings(questions, tmp_path / "out", methods=("medusa",)), path_bed(), quiet=True)
    tried = settings(questions, tmp_path / "out", methods=(), try_methods=("prompt-lookup", "medusa"), batch_sizes=(1,))
    results = run_bench(tried, path_bed(), quiet=True).results
    assert [entry["method"] for entry in results["not_run"]] == ["medusa"]
    assert wanted in results["not_run"][0]["reason"]


def test_methods_are_built_with_their_settings() -> None:
    bed = path_bed()
    lookup = make_method(parse_method("prompt-lookup:depth=7:num_branches=2"), bed)
    assert lookup.settings == "depth=7, max_ngram=8, min_ngram=2, num_branches=2" and not lookup.chain
    assert isinstance(make_method(parse_method("auto"), bed).drafter, Adaptive)
    with pytest.raises(ValueError, match="size is not a setting of prompt-lookup; allowed: depth, max_ngram"):
        parse_method("prompt-lookup:size=3")
    with pytest.raises(ValueError, match="prompt lookup: depth is 0"):
        make_method(parse_method("prompt-lookup:depth=0"), bed)
    assert Chain().depth == 5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperatures": ()}, r"temperatures is \(\)"),
        ({"batch_sizes": (0,)}, r"batch_sizes is \(0,\)"),
        ({"per_task": 0}, "per_task is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"reference_every": 0}, "reference_every is 0"),
    ],
)
def test_settings_are_checked(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        BenchSettings(**change)


def test_larger_batches_run_on_mt_bench_wherever_it_stands(questions: Path, tmp_path: Path) -> None:
    chosen = settings(questions, tmp_path / "out", tasks=("qa", "mt_bench"), methods=("prompt-lookup",))
    results = run_bench(chosen, path_bed(), quiet=True).results
    assert {r["task"] for r in results["records"] if r["batch"] == 2} == {"mt_bench"}


def test_an_unknown_batch_task_is_rejected(questions: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'sum'.*mt_bench, qa"):
        run_bench(settings(questions, tmp_path / "out", batch_task="sum"), path_bed(), quiet=True)
