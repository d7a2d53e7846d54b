"""aquiline check on a tiny model: what it prints, decides and refuses."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Result, call, write_eagle, write_target

SMALL = ("--num-prompts", 12, "--max-new-tokens", 10, "--dtype", "float64", "--quiet")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, heads for it, and prompts."""
    folder = tmp_path_factory.mktemp("check")
    target = write_target(folder / "target", eos_token_id=None)
    write_eagle(folder / "head", "eagle3", target)
    write_eagle(folder / "other", "eagle3")
    os.mkfifo(folder / "pipe")
    (folder / "prompts.txt").write_text("\n".join(f"Question {n}: why {'x' * n}?" for n in range(12)))
    return folder


@pytest.fixture
def check(base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(base)

    def run(*words: object) -> Result:
        return call(capsys, "check", "--target", "target", *words)

    return run


def test_a_random_head_fails_and_its_engine_agrees_with_training(check: Any, base: Path) -> None:
    page = base / "page.html"
    result = check("head", "prompts.txt", "--json", "--depth", 3, "--output", page, *SMALL)
    found = json.loads(result.out)
    assert result.code == 1 and found["passed"] is False
    assert "surely below 0.1" in " ".join(f["text"] for f in found["findings"] if f["failed"])
    assert found["steps"]["compared"] > 80 and found["steps"]["fewer"] == found["steps"]["more"] == 0
    assert [rate["value"] for rate in found["engine"]] == [rate["value"] for rate in found["same_starts"]]
    assert 90 < found["forced"][0]["count"] <= 12 * 9, "chains begin at every token but the last"
    assert len(found["readings"]) >= 10 and not any(each["clear"] for each in found["readings"])
    assert [f["length"] for f in found["forecast"]] == list(range(9)) and found["measured"]["tokens_per_second"] > 0
    text = page.read_text()
    assert text.count("<svg") == 2 and "check failed" in text
    assert check("head", "prompts.txt", *SMALL).out.endswith("check failed\n")


def test_few_prompts_are_said_to_be_too_few(check: Any) -> None:
    result = check("head", "prompts.txt", "--num-prompts", 3, "--max-new-tokens", 4, "--dtype", "float64")
    assert "fewer than 12 answers" in result.out and "Other readings" not in result.out
    assert "answers" in result.err and "features" in result.err, "progress"


def test_files_that_do_not_fit_the_target_are_noted(check: Any, base: Path) -> None:
    odd = shutil.copytree(base / "other", base / "odd")
    document = json.loads((base / "target" / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    first, second = list(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (odd / "tokenizer.json").write_text(json.dumps(document))
    (odd / "chat_template.jinja").write_text("{{ messages[0].content }}")
    result = check(odd, "prompts.txt", "--json", "--num-prompts", 1, "--max-new-tokens", 3, "--dtype", "float64")
    notes = " ".join(finding["text"] for finding in json.loads(result.out)["findings"])
    assert "gives 2 tokens other ids" in notes and "chat template in the head's folder" in notes


def test_a_forecast_needs_no_head(check: Any) -> None:
    result = check("--alpha", ".6,.58,.55", "--json", *SMALL)
    found = json.loads(result.out)
    assert result.code == 0 and found["head"] is None and found["findings"] == []
    assert found["forecast"][3]["tokens_per_step"] == pytest.approx(1 + 0.6 + 0.6 * 0.58 + 0.6 * 0.58 * 0.55)
    assert found["best_length"] in range(9)
    assert "over plain" in check("--alpha", ".6", *SMALL).out


REFUSED = {
    "nothing": ((), ("nothing to check", "--alpha")),
    "both": (("head", "--alpha", ".5"), ("--alpha", "leave one out")),
    "no share": (("--alpha", "high"), ("--alpha is 'high'", ".6,.58")),
    "too high": (("--alpha", "1.5"), ("--alpha is", "0 … 1")),
    "picture of nothing": (("--lossless", "--output", "x.html"), ("--output", "--lossless")),
    "no folder": (("head", "--output", "none/x.html"), ("--output is 'none/x.html'", "a folder that exists")),
    "a page over a folder": (("head", "--output", "target"), ("--output is 'target'", "a file in a folder")),
    "a page over a pipe": (("head", "--output", "pipe"), ("pipe is neither a file nor a folder", "another output")),
    "depth": (("head", "--depth", "1"), ("--depth is 1", "≥ 2")),
    "endless chains": (("head", "--depth", "1000000"), ("chain depth 1000000", "lower depth")),
    "more shares than depths": (("--alpha", ",".join([".5"] * 9)), ("9 shares", "at most 8")),
    "no such head": (("nosuch",), ("unknown draft head 'nosuch'",)),
    "no such prompts": (("head", "none.txt"), ("none.txt is neither",)),
    "plain": (("none", "--lossless"), ("head is 'none'",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input(check: Any, case: str) -> None:
    words, parts = REFUSED[case]
    result = check(*words)
    assert result.code == 2 and all(part in result.error for part in parts), result.err


def test_damaged_files_in_a_heads_folder(check: Any, base: Path) -> None:
    odd = shutil.copytree(base / "head", base / "damaged")
    few = ("--num-prompts", 1, "--max-new-tokens", 3, "--dtype", "float64", "--quiet")
    document = json.loads((base / "target" / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    document["model"]["vocab"] = {token: number - 300 for token, number in vocabulary.items()}
    (odd / "tokenizer.json").write_text(json.dumps(document))
    assert check(odd, "prompts.txt", *few).out.endswith("check passed\n"), "no token has an id below 0"
    (odd / "chat_template.jinja").write_bytes(b"\xff\xfe")
    assert "chat_template.jinja is not UTF-8" in check(odd, "prompts.txt", *few).error
    (odd / "chat_template.jinja").unlink()
    (odd / "tokenizer_config.json").write_text("[1]")
    assert "tokenizer_config.json holds a list, expected an object" in check(odd, "prompts.txt", *few).error


def test_a_setting_without_effect_is_said(check: Any) -> None:
    words = ("--num-prompts", 1, "--max-new-tokens", 3, "--dtype", "float64")
    assert "--seed has no effect without --lossless" in check("head", "prompts.txt", "--seed", 1, *words).err
    assert (
        "--depth has no effect with --lossless" in check("head", "prompts.txt", "--lossless", "--depth", 3, *words).err
    )


def test_answers_of_one_token_have_no_chains(check: Any, base: Path) -> None:
    """A target that ends at once leaves nothing to judge."""
    ended = shutil.copytree(base / "target", base / "ended")
    config = json.loads((ended / "generation_config.json").read_text())
    (ended / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": list(range(258))}))
    result = check("head", "prompts.txt", "--json", "--target", "ended", "--num-prompts", 2, *SMALL[4:])
    found = json.loads(result.out)
    assert found["engine"] == [] and found["measured"] is None and found["steps"]["compared"] == 0
    assert found["forecast"] == [] and not found["passed"] and "no draft was judged" in found["findings"][1]["text"]
    assert "Forecast" not in check("head", "prompts.txt", "--target", "ended", "--num-prompts", 2, *SMALL[4:]).out
