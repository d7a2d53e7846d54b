"""What a newcomer tries: values of another kind, empty names, odd prompts; each ends in one error that helps."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import aquiline
from aquiline import LossyRule, PromptLookup
from aquiline.drafters.lookahead import Lookahead
from aquiline.engine.chat import ChatSession
from tests import tiny
from tests.command_line import Result, call, write_target


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, and one whose tokenizer has no chat template."""
    folder = tmp_path_factory.mktemp("newcomers")
    write_target(folder / "target")
    bare = shutil.copytree(folder / "target", folder / "bare")
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def loaded(base: Path) -> aquiline.Loaded:
    return aquiline.load(base / "target", None)


KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "lookup": (lambda: PromptLookup(1.5), r"prompt lookup: depth is 1.5"),  # type: ignore[arg-type]
    "lookup n-gram": (lambda: PromptLookup(max_ngram="x"), r"max_ngram is 'x'"),  # type: ignore[arg-type]
    "lookahead": (lambda: Lookahead(1.5), r"lookahead: window is 1.5"),  # type: ignore[arg-type]
    "lossy": (lambda: LossyRule("typical", epsilon="x"), r"epsilon is 'x'; allowed: a number"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", KINDS)
def test_kinds_of_drafters(case: str) -> None:
    make, words = KINDS[case]
    with pytest.raises(TypeError, match=words):
        make()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_rows": 1.5}, "max_rows is 1.5; allowed: an integer ≥ 1"),
        ({"max_rows": 0}, "max_rows is 0; allowed: ≥ 1"),
        ({"max_rows": "8"}, "max_rows is '8'"),
        ({"exact": "x"}, "exact is 'x'; allowed: True, False or None"),
        ({"packed": "no"}, "packed is 'no'; allowed: True or False"),
        ({"packed": None}, "packed is None"),
        ({"adaptive": 1}, "adaptive is 1"),
        ({"draft": ""}, "draft is ''; allowed: a name"),
        ({"draft": "prompt-lookup", "tree": ""}, "tree is ''"),
        ({"target": ""}, "target is ''"),
        ({"dtype": [1]}, r"dtype is \[1\]; allowed: a dtype or its name"),
        ({"device": "meta"}, "device is 'meta'"),
        ({"device": "cuda:99"}, "device is 'cuda:99', and PyTorch sees"),
    ],
)
def test_arguments_of_load(base: Path, settings: dict[str, Any], words: str) -> None:
    settings = {"target": base / "target", "draft": None} | settings
    with pytest.raises((TypeError, ValueError), match=words):
        aquiline.load(**settings)


@pytest.mark.parametrize("end", [97, 9999, -1, [1, 97]])
def test_end_tokens_outside_the_vocabulary(end: Any) -> None:
    model = tiny.hf_model.__wrapped__("llama", torch.float32)
    model.generation_config.eos_token_id = end
    with pytest.raises(ValueError, match=r"end-of-sequence tokens \(eos_token_id\) have token id .*allowed: 0 … 96"):
        aquiline.load(model, None)


PROMPTS: dict[str, tuple[Any, str]] = {
    "bytes": (b"abc", "a prompt is a text, .* not bytes"),
    "bytes in a list": ([b"abc"], "not bytes"),
    "tensor": (torch.tensor([1, 2]), "not Tensor"),
    "array": (numpy.array([1, 2]), "not ndarray"),
    "booleans": ([True, False], "True in the prompt is neither"),
    "no role": ([{"content": "x"}], "is not a message; allowed: {'role'"),
    "role of another kind": ([{"role": 5, "content": "x"}], "is not a message"),
    "content of another kind": ([{"role": "user", "content": 5}], "a message has content 5; allowed: a text"),
    "part without a text": ([{"role": "user", "content": [{"type": "text"}]}], "content of type 'text'"),
    "messages and texts": ([{"role": "user", "content": "x"}, "y"], "'y' is not a message"),
    "half a character": ("\ud800", "UTF-8"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts_that_are_none(loaded: aquiline.Loaded, case: str) -> None:
    prompt, words = PROMPTS[case]
    with pytest.raises((TypeError, ValueError), match=words):
        loaded.generate(prompt, max_new_tokens=1)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda ids, scores: None, "returned a NoneType; allowed: scores of shape"),
        (lambda ids, scores: scores[0], r"returned shape \(258,\)"),
        (lambda ids, scores: scores[:, :5], r"returned shape \(1, 5\)"),
    ],
)
def test_processors_that_return_something_else(loaded: aquiline.Loaded, returned: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        loaded.generate("x", max_new_tokens=1, logits_processors=(returned,))


def test_other_arguments(loaded: aquiline.Loaded) -> None:
    with pytest.raises(TypeError, match="raw is 'no'; allowed: True or False"):
        loaded.generate("x", raw="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="stop is None; allowed: a string, or several"):
        loaded.generate("x", stop=None)


def test_chats(loaded: aquiline.Loaded, base: Path) -> None:
    with pytest.raises(TypeError, match="system is 5; allowed: a text or None"):
        loaded.chat(system=5)  # type: ignore[arg-type]
    session = loaded.chat()
    with pytest.raises(TypeError, match="the message is 5; allowed: a text"):
        session.send(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown setting 'max_tokens'; allowed: max_new_tokens"):
        session.send("x", max_tokens=5)
    with pytest.raises(TypeError, match="params is 5; allowed: SamplingParams"):
        session.send("x", 5)  # type: ignore[arg-type]
    session.send("x " * 200, max_new_tokens=1)
    with pytest.raises(ValueError, match=r"\d+ tokens .* 512; begin a new one"):
        session.send("x " * 100)
    with pytest.raises(ValueError, match="a chat needs a tokenizer with a chat template"):
        aquiline.load(base / "bare", None).chat()


def test_grammars(loaded: aquiline.Loaded) -> None:
    pytest.importorskip("llguidance")
    from aquiline.engine.grammar import json_schema, regex

    with pytest.raises(TypeError, match=r"is a Loaded; allowed: an Engine \(loaded.engine\)"):
        regex(loaded, "a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="source is 5; allowed: a text"):
        regex(loaded.engine, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"schema is not JSON .*json\.dumps"):
        json_schema(loaded.engine, {"type": {1}})


# -- the command line ---------------------------------------------------------------------------


@pytest.fixture
def run(base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command in the folder, with bytes as its standard input."""
    monkeypatch.chdir(base)
    monkeypatch.setenv("AQUILINE_CACHE", str(base / "cache"))

    def command(*words: object, given: bytes = b"") -> Result:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
        return call(capsys, *words)

    return command


GENERATE = ("generate", "--target", "target", "--draft", "none", "--max-new-tokens", "2")


@pytest.mark.parametrize(
    ("words", "given", "error"),
    [
        (("x", "--threads", "100000"), b"", f"--threads is 100000; allowed: 1 … {os.cpu_count()}"),
        (("x", "", "y"), b"", "prompt 2 is empty"),
        (("--file", ""), b"not this", "--file '' cannot be read"),
        ((), b"\xff\xfe", "standard input cannot be read"),
        (("--file", "-"), b"\xff\xfe", "standard input cannot be read"),
        (("--file", "-"), b"", "standard input holds no prompt"),
        (("x", "--device", "cuda:99"), b"", "device is 'cuda:99'"),
        (("x", "--target", ""), b"", "target is ''"),
        (("x", "--draft", ""), b"", "draft is ''"),
    ],
)
def test_commands_that_cannot_run(run: Callable[..., Result], words: tuple[str, ...], given: bytes, error: str) -> None:
    result = run(*GENERATE, *words, given=given)
    assert (result.code, result.out) == (2, "") and error in result.error


def test_an_empty_file_and_a_byte_order_mark(run: Callable[..., Result], base: Path) -> None:
    (base / "empty.txt").write_bytes(b"")
    assert "empty.txt holds no prompt" in run(*GENERATE, "--file", "empty.txt").error
    (base / "marked.txt").write_bytes("Hi\r\n".encode("utf-8-sig"))
    result = run(*GENERATE, "--file", "marked.txt", "--json")
    assert json.loads(result.out)["prompt"] == "Hi"


def test_chat_without_a_template_or_text(run: Callable[..., Result]) -> None:
    result = run("chat", "--target", "bare", "--draft", "none", given=b"hi\n")
    assert result.code == 2 and "a chat needs a tokenizer with a chat template" in result.error
    result = run("chat", "--target", "target", "--draft", "none", given=b"\xff\n")
    assert result.code == 2 and "standard input cannot be read" in result.error


class Terminal(io.StringIO):
    """Standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_chat_outlives_ctrl_c_and_refused_turns(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    result = call(capsys, "chat", "--target", "target", "--draft", "none", "--max-new-tokens", "3")
    assert result.code == 0 and len(calls) == 3
    assert "[stopped]" in result.err and result.err.count("error: ") == 1 and "begin a new one" in result.err
    assert result.out.strip()


def test_a_demo_of_no_tokens(run: Callable[..., Result]) -> None:
    result = run("demo", "--target", "target", "--max-new-tokens", 0, "--repeats", 1, "--json")
    assert result.code == 2 and "the answer has 0 tokens, too few to time" in result.error


def test_doctor(run: Callable[..., Result]) -> None:
    result = run("doctor")
    assert result.code == 0 and "torch" in result.out and "packed path" in result.out
    facts = json.loads(run("doctor", "--json").out)
    assert facts["facts"]["torch"] == torch.__version__ and facts["advice"]


def test_prepare_for_a_tokenizer_without_a_template(run: Callable[..., Result], base: Path) -> None:
    pytest.importorskip("pyarrow")
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello you"}]}
    (base / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 2)
    words = ("prepare", "chats.jsonl", "--target", "bare", "--output", "set", "--validation", "0", "--quiet")
    assert "prepare --chat-template FILE" in run(*words).error
    assert "'missing.jinja' cannot be read" in run(*words, "--chat-template", "missing.jinja").error
    end = "{{ eos_token }}\n"
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "{% endfor %}"
    (base / "plain.jinja").write_text(template)
    result = run(*words, "--chat-template", "plain.jinja", "--json")
    assert result.code == 0 and json.loads(result.out)["train"]["conversations"] == 2


def test_the_command_lines_none_means_the_same_in_python(base: Path) -> None:
    loaded = aquiline.load(base / "target", "none")
    assert (loaded.drafter, loaded.draft_name) == (None, "plain")
    with pytest.raises(ValueError, match="a tree was given with draft=None"):
        aquiline.load(base / "target", "none", tree=aquiline.Chain(3))
