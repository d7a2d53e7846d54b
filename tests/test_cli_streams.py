"""Output of `generate` and `chat` as a program at the other end of the pipes sees it, and when."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from aquiline.engine.chat import ChatSession
from tests.command_line import call, write_target

WORDS = ("--target", "target", "--max-new-tokens", 4, "--dtype", "float64", "--quiet")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target."""
    folder = tmp_path_factory.mktemp("cli-streams")
    write_target(folder / "target")
    return folder


@pytest.fixture
def aquiline(base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command in the folder."""
    monkeypatch.chdir(base)
    return lambda *words: call(capsys, *words)


class Pipe(io.StringIO):
    """Standard output as the other end of a pipe sees it: what was flushed."""

    seen = ""

    def flush(self) -> None:
        self.seen = self.getvalue()


class Asking:
    """Standard input of somebody who waits for a whole answer before asking on."""

    def __init__(self, questions: list[str], pipe: Pipe) -> None:
        self.questions, self.pipe, self.answers = questions, pipe, list[str]()

    def isatty(self) -> bool:
        return False

    def readline(self) -> str:
        asked = len(self.answers)
        if asked:
            answer = self.pipe.seen
            assert answer.endswith("\n"), f"turn {asked} waits for an answer, and what came is {answer!r}"
        self.answers.append(self.pipe.seen)
        return self.questions[asked] if asked < len(self.questions) else ""


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_chat_through_pipes_is_answered_turn_by_turn(
    aquiline: Any, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]
) -> None:
    pipe = Pipe()
    asking = Asking(["One\n", "Two\n"], pipe)
    monkeypatch.setattr("sys.stdin", asking)
    monkeypatch.setattr("sys.stdout", pipe)
    assert aquiline("chat", *WORDS, *form).code == 0
    assert len(asking.answers) == 3
    if form:
        records = [json.loads(line) for line in pipe.getvalue().split("\n")[:-1]]
        assert [record["prompt"] for record in records] == ["One", "Two"]
        assert all(len(record["token_ids"]) == 4 and record["seed"] is None for record in records)


def test_outputs_are_printed_as_soon_as_they_are_there(aquiline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from aquiline.loading import Loaded

    pipe, lines = Pipe(), list[int]()
    stream = Loaded.stream

    def watched(*arguments: Any, **settings: Any) -> Iterator[Any]:
        for event in stream(*arguments, **settings):
            lines.append(pipe.seen.count("\n"))
            yield event

    monkeypatch.setattr(Loaded, "stream", watched)
    monkeypatch.setattr("sys.stdout", pipe)
    assert aquiline("generate", "One", "Two", "Three", *WORDS, "--rows", 1, "--json").code == 0
    assert lines == sorted(lines) and set(lines) == {0, 1, 2}
    assert [json.loads(line)["prompt"] for line in pipe.getvalue().split("\n")[:-1]] == ["One", "Two", "Three"]


def test_a_byte_order_mark_is_not_part_of_the_prompt(
    aquiline: Any, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base / "marked.txt").write_bytes("Hi\r\n".encode("utf-8-sig"))
    assert json.loads(aquiline("generate", "--file", "marked.txt", "--json", *WORDS).out)["prompt"] == "Hi"
    for words in (("generate",), ("generate", "--file", "-"), ("chat",)):
        monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffHi\n"))
        assert json.loads(aquiline(*words, "--json", *WORDS).out)["prompt"] == "Hi"


def test_only_a_line_feed_ends_a_line(aquiline: Any, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = ["a\u2028b", "c\u0085d", "e\x1cf"]
    file = base / "odd.jsonl"
    file.write_text(
        "".join(json.dumps(text, ensure_ascii=False) + "\r\n" for text in odd), encoding="utf-8", newline=""
    )
    result = aquiline("generate", "--file", file, "--json", *WORDS)
    assert result.code == 0, result.err
    assert [json.loads(line)["prompt"] for line in result.out.split("\n")[:-1]] == odd
    monkeypatch.setattr("sys.stdin", io.StringIO("one\x0ctwo\nthree\n"))
    result = aquiline("generate", "--file", "-", "--json", *WORDS)
    assert [json.loads(line)["prompt"] for line in result.out.split("\n")[:-1]] == ["one\x0ctwo", "three"]


def test_a_character_that_the_encoding_lacks_is_escaped(aquiline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="cp1252"))
    assert aquiline("generate", "Ö 😀", "--json", *WORDS).code == 0
    assert b'"prompt": "\xd6 \\U0001f600"' in raw.getvalue()


def test_a_closed_standard_output_is_refused(aquiline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    result = aquiline("generate", "Hi", *WORDS)
    assert result.code == 2 and "standard output is closed; redirect" in result.err


def test_closed_standard_input_and_error(
    aquiline: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert "no prompt; give it" in aquiline("generate", *WORDS).error
    monkeypatch.setattr("sys.stderr", None)
    result = aquiline("generate", *WORDS)
    assert (result.code, result.out) == (2, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output_is_named(aquiline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(OSError), open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr("sys.stdout", full)
        result = aquiline("generate", "Hi", *WORDS)
        assert result.code == 1 and "standard output: No space left" in result.err


def test_a_reader_that_has_enough_is_no_failure(base: Path) -> None:
    words = ["generate", "Hi", *map(str, WORDS), "--json"]
    code = f"from aquiline.cli import main; raise SystemExit(main({words!r}))"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=base, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_a_file_in_utf16_and_a_null_prompt(aquiline: Any, base: Path) -> None:
    record = {"prompt": None, "messages": [{"role": "user", "content": "Hé"}]}
    (base / "wide.jsonl").write_bytes(json.dumps(record).encode("utf-16"))
    assert (
        json.loads(aquiline("generate", "--file", "wide.jsonl", "--json", *WORDS).out)["prompt"] == record["messages"]
    )


def test_variables_of_the_template_and_tools(aquiline: Any, base: Path) -> None:
    for words, part in (
        (("--chat-template-kwargs", '{"enable_thinking": false}'), "no setting 'enable_thinking'"),
        (("--chat-template-kwargs", "[1]"), "allowed: a JSON object"),
        (("--tools", "none.json"), "none.json"),
    ):
        result = aquiline("generate", "Hi", *WORDS, *words)
        assert result.code == 2 and part in result.err
    (base / "tools.json").write_text('[{"name": "add"}]')
    assert "does not use tools" in aquiline("generate", "Hi", *WORDS, "--tools", "tools.json").err


class Terminal(io.StringIO):
    """Standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_chat_outlives_ctrl_c_and_refused_turns(aquiline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while a piece is printed, then a turn does not fit: the next one is answered."""
    turns = iter(["hi", "x " * 300, "again", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(turns))
    stream, calls = ChatSession.stream, []

    def interrupted(self: ChatSession, *arguments: Any) -> Any:
        calls.append(arguments[0])
        events = stream(self, *arguments)
        if len(calls) > 1:
            yield from events
            return
        yield next(events)
        raise KeyboardInterrupt

    monkeypatch.setattr(ChatSession, "stream", interrupted)
    monkeypatch.setattr("sys.stdin", Terminal())
    result = aquiline("chat", "--target", "target", "--draft", "none", "--max-new-tokens", "3")
    assert result.code == 0 and len(calls) == 3
    assert "[stopped]" in result.err and result.err.count("error: ") == 1 and "begin a new one" in result.err
    assert result.out.strip()
