"""Commands and code of the documents run, or at least all their options exist."""

from __future__ import annotations

import ast
import doctest
import json
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from aquiline.cli import COMMANDS, build_parser

ROOT = Path(__file__).parent.parent
GUIDES = ("README.md", "docs/guide.md", "docs/training.md")
DOCUMENTS = (
    *GUIDES,
    "CONTRIBUTING.md",
    "docs/benchmarks.md",
    "docs/heads.md",
    "docs/interop.md",
    "docs/findings.md",
)
SHOWN = {
    "batch.py": r"(One fact about b\w+\.\n  \w.*){4}identical to the prompt alone: True",
    "chat.py": r"> What is a glacier\?\n\w.*> Where is the largest one\?\n\w.*identical to a fresh start: True",
    "generate.py": r"\w.*[1-6]\.\d\d tokens per forward, ended by length\nidentical: True",
    "own_model.py": r"\w.*[1-9]\.\d\d tokens per forward\nidentical to transformers: True",
    "stream.py": r"\w.*\[(length|stop|eos) after \d+ tokens\]\nidentical without drafts: True",
    "train_head.py": r"positions, acceptance \{.*: \[0\.\d+.*\w.*[1-6]\.\d\d tokens per forward with the new head",
}
"""Example → what it must print."""


def blocks(document: str, *languages: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w+)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [body for language, body in found if language in languages]


def shell_lines(document: str) -> list[list[str]]:
    """The commands of the shell blocks, word by word; without comments, pipes into files, and `…`."""
    lines = []
    for block in blocks(document, "bash", "sh", "shell", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            for command in re.split(r"\s(?:\||&&)\s", line.removeprefix("$ ")):
                words = shlex.split(command, comments=True)
                if ">" in words:
                    words = words[: words.index(">")]
                if words:
                    lines.append([word for word in words if word != "…"])
    return lines


@pytest.mark.parametrize("document", DOCUMENTS)
def test_shell_commands_exist(document: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for words in shell_lines(document):
        if words[0].endswith("aquiline"):
            parsed = build_parser(words[1]).parse_args(words[1:])
            assert parsed.command in COMMANDS
        elif words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, words


def options_of(command: str) -> set[str]:
    """The option strings of a subcommand."""
    (commands,) = (action for action in build_parser(command)._actions if isinstance(action.choices, dict))
    return {text for action in commands.choices[command]._actions for text in action.option_strings}


@pytest.mark.parametrize("document", GUIDES)
def test_commands_and_options_in_the_text_exist(document: str) -> None:
    known = {command: options_of(command) for command in COMMANDS}
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = [code.split() for code in re.findall(r"`((?:aquiline |--\w)[^`]*)`", text)]
    for words in found:
        allowed = known[words[1]] if words[0] == "aquiline" else set().union(*known.values())
        options = {word for word in words if word.startswith("--") and word != "--"}
        assert options <= allowed, f"{document}: {' '.join(words)}"
    assert found


def test_the_figures_of_the_readme_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The headline and the table of engines equal the committed comparison."""
    monkeypatch.syspath_prepend(ROOT / "interop")
    report = import_module("report")
    run, default = json.loads(report.SPEED.read_text(encoding="utf-8")), "aquiline-bf16-auto"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = [name for name, label in report.SPEED_ENGINES.items() if f"| {label} |" in text]
    assert {"llamacpp-bf16", "llamacpp-q8_0", "llamacpp-q4_0", "aquiline-bf16", default} <= {*shown}
    for name in shown:
        ratio = "" if name == default else report.ratio(run, default, name)
        assert f"| {report.SPEED_ENGINES[name]} | {report.median(report.rates(run, name))[0]:.1f} | {ratio} |" in text
    headline = text.split("\n## ")[0].replace("\n", " ")
    plain, interval = report.ratio(run, default, "aquiline-bf16").split(" ")
    assert f"{plain}× plain decoding {interval}" in headline
    for name, label in (("llamacpp-bf16", "llama.cpp in BF16"), ("llamacpp-q8_0", "llama.cpp in Q8_0")):
        assert f"{report.ratio(run, default, name).split()[0]}× {label}" in headline
    assert f"{run['engines'][default]['equal']} of {run['prompts']} outputs identical" in headline
    gains = report.rates(run, default) / report.rates(run, "aquiline-bf16")
    assert f"{gains.min():.2f}× to {gains.max():.2f}× over these prompts" in text.replace("\n", " ")


def test_comparisons_with_other_engines_are_what_was_recorded() -> None:
    command = [sys.executable, str(ROOT / "interop" / "report.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", ["README.md", "docs/guide.md"])
def test_users_need_nothing_outside_the_repository(document: str) -> None:
    assert "../" not in (ROOT / document).read_text(encoding="utf-8").replace("](../", "](")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_blocks_compile_and_import_what_exists(document: str) -> None:
    for block in blocks(document, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aquiline"):
                module = import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize("document", [*DOCUMENTS, "docs/ARCHITECTURE.md", "docs/results-schema.md", "CHANGELOG.md"])
def test_links_lead_somewhere(document: str) -> None:
    folder = (ROOT / document).parent
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / document).read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (folder / path) if path else ROOT / document
        assert target.exists(), f"{document} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{document} links to {link}"


@pytest.mark.real
@pytest.mark.parametrize("document", ["README.md", "docs/guide.md"])
def test_python_blocks_run_one_after_another(document: str, smollm2_folder: Path) -> None:
    assert smollm2_folder.is_dir()
    names: dict[str, object] = {}
    for number, block in enumerate(blocks(document, "python")):
        # Fewer tokens than people would ask for: the words are not the point here.
        short = re.sub(r"max_new_tokens=\d+", "max_new_tokens=6", block)
        exec(compile(short, f"{document}, block {number}", "exec"), names)


@pytest.mark.real
@pytest.mark.parametrize("name", SHOWN)
def test_examples_show_what_they_promise(name: str, smollm2_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smollm2_folder.is_dir()
    example = ROOT / "examples" / name
    source = re.sub(r"max_new_tokens=\d+", "max_new_tokens=8", example.read_text(encoding="utf-8"))
    source = source.replace("total_positions=4_000", "total_positions=400").replace("1_000", "200")
    exec(compile(source, str(example), "exec"), {"__name__": "__main__"})
    assert re.search(SHOWN[name], capsys.readouterr().out, flags=re.DOTALL)


def test_every_example_is_run() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == SHOWN.keys()


def test_doctests() -> None:
    failed = tested = 0
    for file in sorted((ROOT / "src" / "aquiline").rglob("*.py")):
        if ">>>" in file.read_text(encoding="utf-8"):
            parts = file.relative_to(ROOT / "src").with_suffix("").parts
            result = doctest.testmod(import_module(".".join(part for part in parts if part != "__init__")))
            failed, tested = failed + result.failed, tested + result.attempted
    assert tested > 0 and failed == 0, f"{failed} of {tested} doctests failed"
