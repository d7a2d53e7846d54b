"""Bad input: one line with the value, what is allowed, and the remedy; exit 2, or 1 for a failure."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Result, call, write_eagle, write_target
from tests.full_disk import FullDisk


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, heads that fit it, and a target whose tokenizer has no chat template."""
    folder = tmp_path_factory.mktemp("cli-errors")
    write_eagle(folder / "head", "eagle3", write_target(folder / "target"))
    write_eagle(folder / "head1", "eagle")
    mute = shutil.copytree(folder / "target", folder / "mute")
    (mute / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((mute / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (mute / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def aquiline(base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command in the folder, with bytes as its standard input; without a network."""
    monkeypatch.chdir(base)
    monkeypatch.setenv("AQUILINE_CACHE", str(base / "cache"))

    def run(*words: object, given: bytes = b"") -> Result:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
        return call(capsys, *words)

    return run


def assert_refused(result: Result, *parts: str, code: int = 2) -> None:
    assert result.code == code, (result.code, result.err)
    assert all(part in result.error for part in parts), result.error
    assert result.out == ""


GENERATE = ("generate", "x", "--target", "target", "--max-new-tokens", "2")
PIPED = ("generate", "--target", "target", "--draft", "none", "--max-new-tokens", "2")

VALUES = {
    "negative temperature": (("--temperature", "-1"), ("--temperature is -1.0", "≥ 0")),
    "nan temperature": (("--temperature", "nan"), ("--temperature is nan", "a finite number")),
    "temperature no number": (("--temperature", "warm"), ("--temperature", "'warm'", "generate --help")),
    "top_p zero": (("--top-p", "0"), ("--top-p is 0.0", "(0, 1]")),
    "top_p above one": (("--top-p", "1.5"), ("--top-p is 1.5", "(0, 1]")),
    "top_k": (("--top-k", "-3"), ("--top-k is -3", "≥ 0")),
    "min_p": (("--min-p", "1"), ("--min-p is 1.0", "[0, 1)")),
    "penalty": (("--repetition-penalty", "0"), ("--repetition-penalty is 0.0", "> 0")),
    "budget": (("--max-new-tokens", "-1"), ("--max-new-tokens is -1", "≥ 0")),
    "least": (("--min-new-tokens", "5"), ("--min-new-tokens is 5", "max_new_tokens (2)")),
    "n": (("--n", "0"), ("--n is 0", "≥ 1")),
    "stop": (("--stop", ""), ("--stop is", "non-empty")),
    "rows": (("--rows", "0"), ("--max-rows is 0", "≥ 1")),
    "threads": (("--threads", "0"), ("--threads is 0", "1 …")),
    "too many threads": (("--threads", "100000"), ("--threads is 100000", f"1 … {os.cpu_count()}")),
    "empty target": (("--target", ""), ("--target is ''", "allowed: a name")),
    "empty draft": (("--draft", ""), ("--draft is ''", "allowed: a name")),
    "dtype": (("--dtype", "int3"), ("--dtype", "'int3'", "'bfloat16'")),
    "beams": (("--num-beams", "4"), ("unknown arguments: --num-beams 4", "generate --help")),
    "tree form": (("--tree", "bush:3"), ("'bush:3' is neither a tree nor a file", "chain[:DEPTH")),
    "tree of lookup": (
        ("--draft", "prompt-lookup", "--tree", "static"),
        ("--tree is static", "allowed for prompt-lookup: chain"),
    ),
    "lossy form": (("--lossy", "vague"), ("'vague' is not a rule", "typical")),
    "lossy greedy": (("--lossy", "typical"), ("--temperature is 0", "temperature > 0")),
    "file and words": (("--file", "x.txt"), ("--file", "use one")),
    "no target": (("--target", "nosuch"), ("unknown target 'nosuch'", "smollm2", "hub id")),
    "no draft": (("--draft", "nosuch"), ("unknown draft head 'nosuch'", "prompt-lookup", "hub id")),
    "head as target": (("--target", "head"), ("holds a draft head", "give it as the draft")),
}


@pytest.mark.parametrize("case", VALUES)
def test_values(aquiline: Any, case: str) -> None:
    options, parts = VALUES[case]
    assert_refused(aquiline(*GENERATE, *options), *parts)


PROMPTS = {
    "ids": ([5, 9999], ("token id 9999", "0 … 257")),
    "number": (5, ("line 1: no prompt", "a list of token ids")),
    "empty": ([], ("line 1: no prompt",)),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts(aquiline: Any, base: Path, case: str) -> None:
    prompt, parts = PROMPTS[case]
    file = base / f"{case}.jsonl"
    file.write_text(json.dumps(prompt))
    assert_refused(aquiline("generate", "--file", file, "--target", "target"), *parts)


def test_prompt_files(aquiline: Any, base: Path) -> None:
    assert_refused(aquiline("generate", "Hi", "--prediction", "none.txt"), "--prediction 'none.txt' cannot be read")
    assert_refused(aquiline("generate", "--file", "missing.txt"), "'missing.txt' cannot be read", "UTF-8 text file")
    (base / "broken.jsonl").write_text('"fine"\n{"prompt": \n')
    assert_refused(aquiline("generate", "--file", "broken.jsonl"), "broken.jsonl, line 2: not JSON")
    (base / "blank.txt").write_text("\n\n")
    assert_refused(aquiline("generate", "--file", "blank.txt"), "blank.txt holds no prompt")
    (base / "list.json").write_text('["one",\n"two"]')
    assert_refused(aquiline("generate", "--file", "list.json"), "'list.json' is JSON", ".jsonl")
    (base / "latin.txt").write_bytes("é".encode("latin-1"))
    assert_refused(aquiline("generate", "--file", "latin.txt"), "UTF-8")
    assert_refused(aquiline("generate", "x", "", "y", "--target", "target"), "prompt 2 is empty", "BOS")
    assert_refused(aquiline(*PIPED, "--file", "", given=b"not this"), "--file '' cannot be read", "UTF-8")
    for words in ((), ("--file", "-")):
        assert_refused(aquiline(*PIPED, *words, given=b"\xff\xfe"), "standard input cannot be read", "UTF-8")
    assert_refused(aquiline(*PIPED, "--file", "-"), "standard input holds no prompt")
    long = "x " * 600
    assert_refused(aquiline("generate", long, "--target", "target"), "512", "shorten the prompt")


@pytest.mark.parametrize("command", ["inspect", "generate", "export"])
def test_heads_for_another_target(aquiline: Any, base: Path, command: str) -> None:
    folder = base / "head-width"
    if not folder.exists():
        write_eagle(folder, target_hidden_size=32)
    words = {
        "inspect": ("inspect", folder, "--target", "target"),
        "generate": (*GENERATE, "--draft", folder),
        "export": ("export", folder, "--to", "vllm", "--target", "target"),
    }
    assert_refused(aquiline(*words[command]), "hidden_size 32", "this target has 48", "use the head of this target")


def test_a_head_of_another_target_of_the_same_sizes_is_a_warning(aquiline: Any, base: Path) -> None:
    other = write_target(base / "finetuned")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(bytes(content))
    result = aquiline("generate", "x", "--target", other, "--draft", "head", "--max-new-tokens", 2)
    assert result.code == 0 and "warning: the head in head was trained for another target" in result.err


class Danger:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("import pathlib; pathlib.Path('DANGER').touch()",)


def test_broken_and_dangerous_files(aquiline: Any, base: Path) -> None:
    evil = base / "evil"
    evil.mkdir()
    shutil.copy(base / "head" / "config.json", evil)
    (evil / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Danger()}))
    for words in (("inspect", evil), (*GENERATE, "--draft", evil)):
        assert_refused(aquiline(*words), "evil/pytorch_model.bin", "safetensors")
    pickled = shutil.copytree(base / "target", base / "pickled")
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Danger()}))
    assert_refused(aquiline("generate", "x", "--target", pickled), "pickled .bin files only", "save_pretrained")
    assert not list(base.rglob("DANGER"))
    for name, content in (("cut.gguf", b"GGUF\x03\x00\x00\x00\x05"), ("text.gguf", b"hello, hello, hello")):
        (base / name).write_bytes(content)
        assert_refused(aquiline("generate", "x", "--target", name), name)
        assert_refused(aquiline("inspect", name), name)
    bare = shutil.copytree(base / "target", base / "bare")
    (bare / "tokenizer.json").unlink()
    assert_refused(aquiline("generate", "x", "--target", bare), "no tokenizer", "tokenizer.json")
    config = base / "head" / "config.json"
    assert_refused(aquiline("generate", "x", "--target", config), "is not a target", "give its folder")


def test_a_chat_needs_a_template_and_text(aquiline: Any) -> None:
    words = ("chat", "--draft", "none", "--target")
    assert_refused(aquiline(*words, "mute", given=b"hi\n"), "chat template", "instruction-tuned")
    assert_refused(aquiline(*words, "target", given=b"\xff\n"), "standard input cannot be read", "UTF-8")


def test_prepare_for_a_tokenizer_without_a_template(aquiline: Any, base: Path) -> None:
    pytest.importorskip("pyarrow")
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello you"}]}
    (base / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 2)
    words = ("prepare", "chats.jsonl", "--target", "mute", "--output", "set", "--validation", "0", "--quiet")
    assert "prepare --chat-template FILE" in aquiline(*words).error
    assert "'missing.jinja' cannot be read" in aquiline(*words, "--chat-template", "missing.jinja").error
    end = "{{ eos_token }}\n"
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "{% endfor %}"
    (base / "plain.jinja").write_text(template)
    result = aquiline(*words, "--chat-template", "plain.jinja", "--json")
    assert result.code == 0 and json.loads(result.out)["train"]["conversations"] == 2


COMMANDS = {
    "nothing": ((), ("COMMAND",)),
    "unknown command": (("generat",), ("invalid choice: 'generat'", "'generate'")),
    "export format": (("export", "head", "--to", "tensorrt", "--target", "target"), ("'tensorrt'", "'vllm'")),
    "export method": (
        ("export", "head1", "--to", "openvino", "--target", "target"),
        ("it knows EAGLE-3 heads only", "Formats that can hold it: safeailab, vllm"),
    ),
    "gguf without the target's": (("export", "head", "--to", "gguf", "--target", "target"), ("the target's own GGUF",)),
    "serve port": (("serve", "--port", "70000"), ("--port is 70000", "65535")),
    "serve engine": (("serve", "--engine", "tgi"), ("'tgi'", "vllm")),
    "serve vllm options": (("serve", "--dry-run"), ("--dry-run", "--engine vllm")),
    "serve own options": (("serve", "--engine", "vllm", "--port", "9"), ("--port", "after --")),
    "serve model": (("serve", "smollm2"), ("'smollm2'", "--target")),
    "serve json": (("serve", "--engine", "vllm", "--json"), ("--dry-run",)),
    "serve no head": (("serve", "--engine", "vllm", "--target", "target"), ("no shipped head", "aquiline train")),
    "serve own flag": (
        ("serve", "--engine", "vllm", "--target", "target", "--draft", "head", "--dry-run", "--", "-sc", "{}"),
        ("-sc", "instead"),
    ),
    "serve tokens": (
        ("serve", "--engine", "vllm", "--target", "target", "--draft", "head", "--dry-run", "--draft-tokens", "0"),
        ("num_draft_tokens is 0", "≥ 1"),
    ),
    "bench method": (("bench", "--methods", "magic"), ("unknown method 'magic'", "prompt-lookup")),
    "bench task": (("bench", "--tasks", "chess", "--target", "target"), ("unknown task 'chess'", "mt_bench")),
    "bench per task": (("bench", "--per-task", "0"), ("--per-task is 0", "≥ 1")),
    "bench budget": (("bench", "--max-new-tokens", "0"), ("--max-new-tokens is 0", "≥ 1")),
    "bench head form": (("bench", "--head", "magic"), ("--head is 'magic'", "KIND=FOLDER", "medusa")),
    "bench lacks a head": (
        ("bench", "--methods", "medusa", "--target", "target", "--output", "nohead"),
        ("medusa needs a head", "aquiline train"),
    ),
    "tune below a file": (
        ("tune", "--target", "target", "--output", "target/config.json/x"),
        ("config.json is a file", "another output"),
    ),
    "tune folder": (("tune", "--output", "."), ("output is '.', a folder", "the file to write")),
    "tune temperature": (("tune", "--temperature", "-1"), ("--temperature is -1", "≥ 0")),
    "tune infinite": (("tune", "--temperature", "inf"), ("--temperature is inf", "a finite number ≥ 0")),
    "tune prompts": (("tune", "--num-prompts", "1"), ("--num-prompts is 1", "≥ 2")),
    "tune file": (("tune", "nowhere.txt", "--target", "target"), ("nowhere.txt is neither a folder nor a file",)),
    "prepare missing": (("prepare", "nowhere.json", "--output", "o", "--target", "target"), ("nowhere.json",)),
    "prepare endpoint": (("prepare", "x", "--output", "o", "--endpoint", "http://x"), ("without --regenerate",)),
    "train data": (("train", "nowhere", "--output", "r", "--target", "target"), ("nowhere",)),
    "train method": (("train", "x", "--output", "r", "--method", "dice"), ("'dice'", "'medusa'")),
    "train setting": (
        ("train", "x", "--output", "r", "--method", "eagle3", "--num-heads", "3", "--target", "target"),
        ("--num-heads has no effect with --method eagle3",),
    ),
    "train other setting": (
        ("train", "x", "--output", "r", "--method", "medusa", "--ttt-steps", "3", "--target", "target"),
        ("--ttt-steps has no effect with --method medusa",),
    ),
    "train value": (
        ("train", "x", "--output", "r", "--ttt-steps", "0", "--target", "target"),
        ("--ttt-steps is 0", "≥ 1"),
    ),
    "train rate": (("train", "x", "--output", "r", "--lr", "-1", "--target", "target"), ("--lr is -1", "> 0")),
    "demo repeats": (("demo", "--repeats", "0"), ("--repeats is 0", "≥ 1")),
    "demo tokens": (
        ("demo", "--target", "target", "--max-new-tokens", "0", "--repeats", "1", "--json"),
        ("0 tokens, too few to time", "--max-new-tokens"),
    ),
    "completion": (("completion", "fish"), ("'fish'", "'bash'")),
    "prepare below a file": (
        ("prepare", "x", "--output", "head/config.json/set", "--target", "target"),
        ("head/config.json/set cannot be made", "config.json is a file", "name another"),
    ),
    "train long name": (
        ("train", "x", "--output", "n" * 300, "--target", "target"),
        ("File name too long", "check the name"),
    ),
    "regenerate long name": (
        ("prepare", "x", "--regenerate", "--output", "n" * 250, "--target", "target"),
        ("n.settings.json: File name too long",),
    ),
    "chat address": (("chat", "--url", "http://[::1"), ("'http://[::1/v1' is not an address",)),
    "chat address in Unicode": (("chat", "--url", "http://127.0.0.1:9/é"), ("is not an address", "ASCII")),
    "chat key": (("chat", "--url", "http://127.0.0.1:9", "--api-key", "secret\n"), ("the API key has a line break",)),
    "inspect": (("inspect", "nosuch"), ("unknown draft head 'nosuch'",)),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_commands(aquiline: Any, case: str) -> None:
    words, parts = COMMANDS[case]
    assert_refused(aquiline(*words), *parts)


FAILURES: dict[str, tuple[Exception, int, tuple[str, ...]]] = {
    "memory": (RuntimeError("DefaultCPUAllocator: can't allocate memory: x"), 1, ("out of memory", "--rows")),
    "cuda memory": (RuntimeError("CUDA out of memory. Tried"), 1, ("out of memory", "--dtype")),
    "failure": (RuntimeError("the server\nsaid no"), 1, ("the server said no",)),
    "missing package": (ModuleNotFoundError("x", name="pyarrow.ipc"), 1, ("'pyarrow.ipc'", "aquiline[train]")),
    "disk": (OSError(28, "No space left on device", "out"), 1, ("out: No space left on device",)),
    "bug": (KeyError("x"), 1, ("KeyError", "--debug")),
    "interrupt": (KeyboardInterrupt(), 130, ()),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", FAILURES)
def test_failures_exit_with_one(aquiline: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, code, parts = FAILURES[case]

    def fail(arguments: Any) -> int:
        raise error

    monkeypatch.setattr("aquiline.commands.doctor.run", fail)
    result = aquiline("doctor")
    if case == "interrupt":
        assert (result.code, result.err) == (130, "interrupted\n")
        return
    assert_refused(result, *parts, code=code)


WRITING = {
    "prepare": ("prepare", "said.jsonl", "--target", "target", "--output", "out/set"),
    "regenerate": (
        "prepare", "said.jsonl", "--target", "target", "--regenerate", "--max-new-tokens", "4", "--output", "out/said",
    ),
    "export": ("export", "head", "--to", "speculators", "--target", "target", "--output", "out/head"),
    "bench": (
        "bench", "--target", "target", "--methods", "prompt-lookup", "--questions", "asked.jsonl", "--max-new-tokens",
        "4", "--output", "out/bench",
    ),
    "tune": ("tune", "asked.jsonl", "--target", "target", "--max-new-tokens", "4", "--output", "out/tuned.json"),
}  # fmt: skip


@pytest.mark.parametrize("command", WRITING)
def test_a_disk_that_fills_at_any_file_is_one_error_that_names_it(aquiline: Any, base: Path, command: str) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, and welcome."}]
    Path("said.jsonl").write_text("".join(json.dumps({"messages": turns, "id": i}) + "\n" for i in range(4)))
    Path("asked.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "What is it?"}\n')
    nth = 0
    while True:
        shutil.rmtree("out", ignore_errors=True)
        Path("out").mkdir()
        nth += 1
        with FullDisk(nth) as disk:
            result = aquiline(*WRITING[command])
        if not disk.full:
            break
        assert result.code == 1 and "out/" in result.error and "File too large" in result.error, result.err
        assert "(a bug" not in result.err and not list(Path("out").rglob("*.partial*"))
        assert command != "tune" or "is the fastest here" in result.err
    assert result.code == 0 and nth > (1 if command == "tune" else 2)


def test_debug_shows_the_traceback(aquiline: Any) -> None:
    with pytest.raises(ValueError, match="temperature is -1"):
        aquiline(*GENERATE, "--temperature", "-1", "--debug")
