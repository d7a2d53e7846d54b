"""Every command on a tiny model: what it prints, writes and returns."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from aquiline.cli import COMMANDS, build_parser
from aquiline.commands.doctor import examine
from aquiline.drafters.trees import TREE_FORMS
from tests.command_line import Result, call, write_eagle, write_target
from tests.conftest import runs_kernels

TEXT = "Tell me a story."
EXACT = ("--dtype", "float64")  # random models have near-ties that float32 kernels may break either way


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and heads for it."""
    folder = tmp_path_factory.mktemp("cli")
    target = write_target(folder / "target")
    write_eagle(folder / "eagle3", "eagle3", target)
    write_eagle(folder / "eagle", "eagle", target)
    return folder


@pytest.fixture
def aquiline(base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command in the folder."""
    monkeypatch.chdir(base)

    def run(*words: object) -> Result:
        return call(capsys, *words)

    return run


def records(result: Result) -> list[dict[str, Any]]:
    assert result.code == 0, result.err
    return [json.loads(line) for line in result.out.splitlines()]


def test_generate_streams_text_and_names_the_draft(aquiline: Any) -> None:
    result = aquiline("generate", TEXT, "--target", "target", "--max-new-tokens", 12, *EXACT)
    assert result.code == 0 and result.out.endswith("\n")
    lines = result.err.splitlines()
    assert "drafting by prompt lookup" in lines[0] and lines[1] == "drafting: prompt lookup"
    assert lines[2].startswith("[12 tokens, ") and lines[2].endswith("ended by length]")


@pytest.mark.parametrize(
    "draft",
    [
        ("--draft", "prompt-lookup"),
        ("--draft", "lookahead"),
        ("--draft", "eagle3"),
        ("--draft", "eagle3", "--tree", "dynamic:12,3,4"),
        ("--draft", "eagle3", "--tree", "chain:4,0.05"),
        ("--draft", "eagle", "--tree", "static"),
    ],
)
@pytest.mark.parametrize("sampled", [(), ("--temperature", "0.9", "--top-p", "0.9", "--seed", "5")])
def test_every_draft_gives_the_output_of_plain_decoding(aquiline: Any, draft: tuple[str, ...], sampled: Any) -> None:
    words = ("generate", TEXT, "--target", "target", "--max-new-tokens", 24, "--json", *EXACT, *sampled)
    plain, drafted = records(aquiline(*words, "--draft", "none")), records(aquiline(*words, *draft))
    assert drafted[0]["token_ids"] == plain[0]["token_ids"]
    assert plain[0]["stats"]["nodes"] == 0
    # Without a given tree, the drafter drafts what pays on this machine, which may be nothing.
    if "--tree" in draft:
        assert drafted[0]["stats"]["nodes"] > 0


def test_generate_many(aquiline: Any, base: Path) -> None:
    file = base / "prompts.jsonl"
    lines: list[Any] = ["One", {"prompt": "Two"}, [{"role": "user", "content": "Three"}], [5, 6, 7]]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    words = ("--target", "target", "--max-new-tokens", 4, "--json", "--quiet", *EXACT)
    result = aquiline("generate", "--file", file, *words)
    found = records(result)
    assert result.err == ""
    assert [record["prompt"] for record in found] == ["One", "Two", lines[2], lines[3]]
    parts = base / "parts.jsonl"
    parts.write_text(json.dumps([{"role": "user", "content": [{"type": "text", "text": t} for t in ("Thr", "ee")]}]))
    assert records(aquiline("generate", "--file", parts, *words))[0]["token_ids"] == found[2]["token_ids"]
    alone = records(aquiline("generate", "Three", *words))
    assert alone[0]["token_ids"] == found[2]["token_ids"], "messages are what the template makes of the text"
    file.with_suffix(".txt").write_text("One\n\nTwo\n")
    texts = records(aquiline("generate", "--file", file.with_suffix(".txt"), *words))
    assert [record["token_ids"] for record in texts] == [record["token_ids"] for record in found[:2]]
    sampled = records(aquiline("generate", "One", "--n", 2, "--temperature", 1, "--seed", 4, *words))
    assert len(sampled) == 2 and sampled[0]["token_ids"] != sampled[1]["token_ids"]


def test_generate_reads_standard_input(aquiline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("generate", "--target", "target", "--max-new-tokens", 4, "--json", *EXACT)
    monkeypatch.setattr("sys.stdin", io.StringIO("One\nTwo\n"))
    assert [record["prompt"] for record in records(aquiline(*words))] == ["One\nTwo"]
    monkeypatch.setattr("sys.stdin", io.StringIO("One\nTwo\n"))
    assert [record["prompt"] for record in records(aquiline(*words, "--file", "-"))] == ["One", "Two"]


def test_profile_shows_every_phase(aquiline: Any) -> None:
    result = aquiline("generate", TEXT, "--target", "target", "--profile", "--draft", "eagle3", "--max-new-tokens", 8)
    for phase in ("prefill", "draft", "target", "accept", "commit", "extend"):
        assert phase in result.err


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (("--seed", "3"), "--seed has no effect at temperature 0"),
        (("--top-p", "0.5"), "--top-p has no effect at temperature 0"),
        (("--top-k", "5"), "--top-k has no effect at temperature 0"),
        (("--min-p", "0.5"), "--min-p has no effect at temperature 0"),
        (("--n", "2"), "--n 2 repeats the same output 2 times"),
        (("--draft", "none", "--tree", "chain:3"), "--tree has no effect with --draft none"),
        (("--draft", "none", "--lossy", "typical"), "--lossy has no effect with --draft none"),
    ],
)
def test_options_without_effect_are_named(aquiline: Any, options: tuple[str, ...], warning: str) -> None:
    result = aquiline("generate", TEXT, "--target", "target", "--max-new-tokens", 2, "--quiet", *options)
    assert result.code == 0 and f"warning: {warning}" in result.err


def test_lossy_acceptance_is_said_and_counted(aquiline: Any) -> None:
    words = ("generate", TEXT, "--target", "target", "--max-new-tokens", 4, "--draft", "eagle3", "--json")
    result = aquiline(*words, "--temperature", 1, "--lossy", "typical:0.5,0.5")
    assert records(result)[0]["stats"]["lossy"] is True
    assert "warning: lossy acceptance" in result.err


def test_chat_remembers(aquiline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("chat", "--target", "target", "--max-new-tokens", 6, "--system", "Be brief.", *EXACT)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAnd now?\n\nnever read\n"))
    answers = records(aquiline(*words, "--json"))
    assert [answer["prompt"] for answer in answers] == ["Hello", "And now?"]
    assert answers[1]["stats"]["prompt_tokens"] > answers[0]["stats"]["prompt_tokens"]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    result = aquiline(*words)
    assert result.code == 0 and result.out == answers[0]["text"] + "\n"


def test_demo_compares(aquiline: Any) -> None:
    words = ("demo", TEXT, "--target", "target", "--max-new-tokens", 12, "--repeats", 1, *EXACT)
    result = aquiline(*words, "--draft", "eagle3")
    assert result.code == 0 and "speculative" in result.out and result.out.splitlines()[-1] == "tokens: identical"
    record = records(aquiline(*words, "--json"))[0]
    assert record["identical"] is True and record["tokens"] == 12 and record["speedup"] > 0


def test_inspect(aquiline: Any, base: Path) -> None:
    result = aquiline("inspect", "eagle3", "--target", "target")
    assert result.code == 0
    for part in ("EAGLE-3", "64 tokens", "fits a target with hidden 48", "this very target"):
        assert part in result.out
    record = json.loads(aquiline("inspect", "eagle", "--json").out)
    assert record["config"]["kind"] == "eagle" and record["checked_against"] is None
    other = write_target(base / "other", num_hidden_layers=8)
    assert "ANOTHER target" in aquiline("inspect", "eagle3", "--target", other).out


def test_published_medusa_heads(aquiline: Any, base: Path) -> None:
    folder, width, vocabulary = base / "medusa-published", 48, 258
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    shapes = {"0.linear.weight": (width, width), "0.linear.bias": (width,), "1.weight": (vocabulary, width)}
    tensors = {f"{head}.{name}": torch.ones(shape) / (1 + head) for head in range(2) for name, shape in shapes.items()}
    torch.save(tensors, folder / "medusa_lm_head.pt")
    record = json.loads(aquiline("inspect", folder, "--target", "target", "--json").out)
    assert record["dialect"] == "FasterDecoding/Medusa" and record["checked_against"]
    words = ("generate", TEXT, "--target", "target", "--max-new-tokens", 8, "--json", *EXACT)
    # A given tree is drafted whatever it costs.
    drafted = aquiline(*words, "--draft", folder, "--tree", "chain:2")
    assert records(drafted)[0]["token_ids"] == records(aquiline(*words, "--draft", "none"))[0]["token_ids"]
    assert "(published medusa)" in drafted.err and records(drafted)[0]["stats"]["nodes"] > 0


@pytest.mark.parametrize("engine", ["safeailab", "vllm", "speculators", "sglang"])
def test_export_and_what_it_prints(aquiline: Any, base: Path, engine: str) -> None:
    output = base / f"out-{engine}"
    # The reference reads fixed layers, which a random head of other layers is not.
    source = write_eagle(base / "default", features=(2, 3, 4))
    result = aquiline("export", source, "--to", engine, "--output", output, "--target", "target")
    assert result.code == 0 and str(output) in result.out
    assert (output / "README.md").is_file() and (output / "config.json").is_file()
    record = json.loads(aquiline("export", source, "--to", engine, "--target", "target", "--json").out)
    assert record["path"] == f"default-{engine}" and record["format"] == engine
    assert aquiline("inspect", output, "--target", "target").code == 0


def test_serve_composes_the_command(aquiline: Any) -> None:
    words = ("serve", "--engine", "vllm", "--target", "target", "--draft", "eagle3", "--dry-run")
    command = json.loads(aquiline(*words, "--json", "--", "--port", 9000).out)
    assert command[:3] == ["vllm", "serve", "target"] and command[-2:] == ["--port", "9000"]
    assert json.loads(command[4])["num_speculative_tokens"] == 3
    assert aquiline(*words, "--draft-tokens", 5).out.startswith("vllm serve target --speculative-config '{")


def conversations(file: Path, count: int) -> Path:
    text = [
        {"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"I say {i}." * 3}]}
        for i in range(count)
    ]
    file.write_text("\n".join(json.dumps(record) for record in text))
    return file


def test_prepare_train_and_draft_with_the_result(aquiline: Any, base: Path) -> None:
    source = conversations(base / "talk.jsonl", 40)
    prepared = aquiline(
        "prepare", source, "--output", "set", "--target", "target", "--validation", 0.2, "--json", "--quiet"
    )
    report = records(prepared)[0]
    assert report["train"]["conversations"] + report["validation"]["conversations"] == 40
    assert report["validation"]["conversations"] > 0
    small = (
        "--target", "target", "--total-positions", "1_000", "--batch-positions", 200, "--warmup-positions", 100,
        "--draft-vocab-size", 64, "--dtype", "float32", "--workers", 1,
    )  # fmt: skip
    trained = aquiline("train", "set", "--output", "run", "--ttt-steps", 2, *small)
    assert trained.code == 0, trained.err
    assert "finished: " in trained.out and "n-α on set: " in trained.out and "--draft run" in trained.out
    assert (base / "run" / "head" / "config.json").is_file()
    words = ("generate", TEXT, "--target", "target", "--draft", "run", "--tree", "chain", "--json", *EXACT)
    drafted = records(aquiline(*words))
    assert drafted[0]["stats"]["nodes"] > 0
    again = aquiline("train", "set", "--output", "run", "--resume", "--json", "--ttt-steps", 2, *small)
    assert json.loads(again.out)["stopped"] == "finished"
    changed = aquiline("train", "set", "--output", "run", "--resume", "--ttt-steps", 3, *small)
    assert changed.code == 2 and "ttt_steps: 2 → 3" in changed.error


@pytest.mark.parametrize("method", ["medusa", "hydra", "small-model"])
def test_other_methods_train_and_draft(aquiline: Any, base: Path, method: str) -> None:
    source = conversations(base / "talk.jsonl", 12)
    words = ("--output", f"set-{method}", "--target", "target", "--validation", 0.2, "--quiet")
    assert aquiline("prepare", source, *words).code == 0
    trained = aquiline(
        "train", f"set-{method}", "--method", method, "--output", f"run-{method}", "--target", "target",
        "--total-positions", 400, "--batch-positions", 200, "--warmup-positions", 100, "--dtype", "float32",
        "--workers", 1, "--num-layers" if method == "small-model" else "--num-heads", 2, "--json",
    )  # fmt: skip
    assert trained.code == 0, trained.err
    assert json.loads(trained.out)["steps"] == 2
    words = ("generate", TEXT, "--target", "target", "--max-new-tokens", 16, "--json", *EXACT)
    plain = records(aquiline(*words, "--draft", "none"))
    result = aquiline(*words, "--draft", f"run-{method}", "--tree", "chain:2")
    drafted = records(result)
    assert drafted[0]["token_ids"] == plain[0]["token_ids"] and drafted[0]["stats"]["nodes"] > 0
    named = "small model" if method == "small-model" else method
    assert f"drafting: head ({named})" in result.err


def test_regenerate_with_our_own_engine(aquiline: Any, base: Path) -> None:
    source = conversations(base / "talk.jsonl", 3)
    words = ("prepare", source, "--regenerate", "--output", "own.jsonl", "--target", "target", "--temperature", 0)
    report = records(aquiline(*words, "--max-new-tokens", 5, "--rows", 2, "--json", "--quiet"))[0]
    assert report["written"] + sum(report["refused"].values()) == 3
    again = records(aquiline(*words, "--max-new-tokens", 5, "--rows", 2, "--json", "--quiet"))[0]
    assert again["already"] == report["written"]


def questions(base: Path) -> Path:
    file = base / "questions" / "mt_bench.jsonl"
    file.parent.mkdir(exist_ok=True)
    lines = [{"question_id": i, "category": "writing", "turns": [f"Write {i} lines."]} for i in range(4)]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file.parent


def test_bench_writes_a_report(aquiline: Any, base: Path) -> None:
    words = (
        "bench", "--target", "target", "--questions", questions(base), "--per-task", 1, "--max-new-tokens", 6,
        "--methods", "prompt-lookup", "eagle3:chain:2", "--head", "eagle3=eagle3", "--batch-sizes", 1,
        "--no-cost-curve", "--output", "bench", "--quiet", *EXACT,
    )  # fmt: skip
    result = aquiline(*words)
    assert result.code == 0, result.err
    assert "eagle3:chain:2" in result.out
    assert {"results.json", "results.md", "report.html"} <= {path.name for path in (base / "bench").iterdir()}
    written = json.loads((base / "bench" / "results.json").read_text())
    assert json.loads(aquiline(*words, "--json").out)["methods"] == written["methods"]
    listed = aquiline("bench", "--list")
    assert listed.code == 0 and "eagle3+lookup" in listed.out and "mt_bench" in listed.out
    assert set(json.loads(aquiline("bench", "--list", "--json").out)) == {"methods", "tasks"}


def test_tune_writes_what_generate_takes(aquiline: Any, base: Path) -> None:
    words = ("--target", "target", "--num-prompts", 2, "--max-new-tokens", 6, "--finalists", 1, *EXACT)
    result = aquiline("tune", questions(base), "--output", "tuned.json", "--json", *words)
    assert result.code == 0, result.err
    record = json.loads(result.out)
    assert record["path"] == "tuned.json" and {row["label"] for row in record["contestants"]} >= {"plain"}
    used = aquiline("generate", TEXT, "--target", "target", "--tree", "tuned.json", "--max-new-tokens", 2)
    assert used.code == 0, used.err


def test_doctor(aquiline: Any) -> None:
    found = json.loads(aquiline("doctor", "--json").out)
    assert found["facts"]["torch"] == torch.__version__ and found["advice"]
    assert found["facts"]["cuda"] is False and "pretended" not in str(found["advice"])
    shown = aquiline("doctor").out
    assert "torch" in shown and "native kernels" in shown
    assert found["facts"]["path, bfloat16"].startswith("native kernels") == runs_kernels()


@pytest.mark.parametrize(("policy", "advised"), [("passive", False), ("active", True)])
def test_doctor_advises_settings_that_are_not_made(policy: str, advised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr(os, "getloadavg", lambda: (999.0, 0.0, 0.0))
    busy = next(line for line in examine()[1] if "busy" in line)
    assert ("OMP_WAIT_POLICY=passive" in busy) == advised


def test_doctor_says_what_was_checked_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args: "GPU of tests")
    for capability, dtype in (((8, 6), "bfloat16"), ((7, 5), "float16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args, found=capability: found)
        facts, advice = examine()
        assert facts["cuda"] == f"GPU of tests, {dtype} by default"
        assert any("pretended" in line and "benchmarks/gpu.py" in line for line in advice)


def test_completion_knows_every_command(aquiline: Any) -> None:
    script = aquiline("completion", "bash").out
    assert all(name in script for name in COMMANDS) and "--draft-vocab-size" in script


def test_help_of_every_command_is_a_sentence(aquiline: Any) -> None:
    for name in COMMANDS:
        result = aquiline(name, "--help")
        assert result.code == 0 and "usage: aquiline" in result.out
        forms = "--tree" not in result.out or "".join(TREE_FORMS.split()) in "".join(result.out.split())
        assert forms, "the help of --tree differs from the language"
    assert aquiline("--version").out.startswith("aquiline ")


def test_starting_imports_only_what_it_needs(base: Path) -> None:
    """transformers' tokenizers take a second to import, its modeling code several."""
    code = (
        "import os, sys; from aquiline.cli import build_parser, main\n"
        "build_parser('generate')\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "main(['doctor', '--json']); assert os.environ['GOMP_SPINCOUNT'] == '20000'\n"
        "assert 'transformers' not in sys.modules\n"
        f"main(['generate', 'x', '--target', {str(base / 'target')!r}, '--max-new-tokens', '1'])\n"
        "names = [n for n in sys.modules if n.startswith('transformers.models.') and '.modeling_' in n]\n"
        "assert not names, names\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def test_only_the_named_command_fills_its_options() -> None:
    parsed = build_parser("generate").parse_args(["generate", "x", "--temperature", "0.5"])
    assert parsed.temperature == 0.5
    with pytest.raises(SystemExit, match="2"):
        build_parser("generate").parse_args(["train", "x", "--output", "y"])
