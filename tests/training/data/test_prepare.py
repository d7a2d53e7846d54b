"""From conversations to a training set: tokens, masks, counts, and an output that appears whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aquiline.models.files import locked
from aquiline.training.data import prepare as data
from aquiline.training.data.conversations import (
    ROLES,
)
from aquiline.training.data.dataset import open_training_set
from aquiline.training.data.prepare import prepare
from aquiline.training.data.tokens import tokenizer_hash
from tests.training.chat_templates import QWEN3_FIELDS, TOOLS
from tests.training.data.talks import TALKS, as_messages, lines, turns


def test_prepared_tokens_and_masks(source: Path, smollm2_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    report = prepare(source, smollm2_folder, tmp_path / "set", max_length=200, validation_fraction=0)
    training = open_training_set(tmp_path / "set", tokenizer_hash=tokenizer_hash(tokenizer))
    assert len(training) == report.train.conversations == 3
    for example, talk in zip(training, TALKS, strict=True):
        messages = [{"role": role, "content": text} for role, text in talk]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert tokenizer.decode(example.input_ids) == text
        answers = [answer + "<|im_end|>" for role, answer in talk if role == "assistant"]
        assert tokenizer.decode(example.input_ids[example.loss_mask]) == "".join(answers)
        # Ends of turns: as many as answers, and each is the last token of its run.
        run_ends = example.loss_mask & ~np.append(example.loss_mask[1:], False)
        assert tokenizer.decode(example.input_ids[run_ends]) == "<|im_end|>" * len(answers)
    assert training.lengths.tolist() == [len(example.input_ids) for example in training]
    assert report.train.tokens == training.lengths.sum()
    assert report.train.loss_tokens == sum(int(example.loss_mask.sum()) for example in training)
    assert [example.source for example in training] == ["talks:1", "talks:2", "talks:4"]


def test_an_unfinished_answer_ends_without_an_end_of_turn(smollm2_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "talks").write_text(lines([as_messages(TALKS[1]) | {"finished": False}]))
    report = prepare(tmp_path / "talks", smollm2_folder, tmp_path / "set", max_length=99)
    assert report.adjusted == {data.UNFINISHED: 1}
    parts = (open_training_set(tmp_path / "set", split=split) for split in ("train", "validation"))
    [example] = [example for part in parts for example in part]
    answers = [text for role, text in TALKS[1] if role == "assistant"]
    masked = tokenizer.decode(example.input_ids[example.loss_mask])
    assert masked == f"{answers[0]}<|im_end|>{answers[1]}"
    assert example.loss_mask[-1]


def test_overlong_conversations(source: Path, smollm2_folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_length": 45, "validation_fraction": 0}
    cut = prepare(source, smollm2_folder, tmp_path / "cut", **options)
    dropped = prepare(source, smollm2_folder, tmp_path / "dropped", overlong="drop", **options)
    whole = prepare(source, smollm2_folder, tmp_path / "whole", max_length=200, validation_fraction=0)
    lengths = open_training_set(whole.output).lengths
    long = int((lengths > 45).sum())
    assert 0 < long < 3
    assert cut.adjusted == {data.TRUNCATED: long}
    assert sorted(open_training_set(cut.output).lengths) == sorted(np.minimum(lengths, 45))
    assert dropped.refused == {data.TOO_LONG: long}
    assert dropped.train.conversations == 3 - long
    short = prepare(source, smollm2_folder, tmp_path / "short", max_length=26, validation_fraction=0)
    assert short.refused[data.NOTHING_LEFT] >= 1


def test_the_manifest_tells_what_it_was_made_from(source: Path, smollm2_folder: Path, tmp_path: Path) -> None:
    sets = []
    for name in ("one", "two"):
        prepare(source, smollm2_folder, tmp_path / name, max_length=45, validation_fraction=0)
        sets.append(open_training_set(tmp_path / name))
    assert sets[0].fingerprint == sets[1].fingerprint
    manifest = sets[0].manifest
    [described] = manifest["sources"]
    assert described["bytes"] == source.stat().st_size
    assert len(described["sha256"]) == len(manifest["template_hash"]) == 64
    assert manifest["settings"]["max_length"] == 45
    assert manifest["counts"]["train"]["conversations"] == 3
    prepare(source, smollm2_folder, tmp_path / "two", max_length=46, overwrite=True)
    assert open_training_set(tmp_path / "two").fingerprint != sets[0].fingerprint


def test_refused_records_are_counted_and_listed(smollm2_folder: Path, tmp_path: Path) -> None:
    bad = [turns("user", "user", "assistant"), as_messages([("user", "Hi"), ("assistant", "Bye<|im_end|>")])]
    (tmp_path / "talks").write_text(lines([as_messages(TALKS[0]), *bad]))
    output = tmp_path / "set"
    report = prepare(tmp_path / "talks", smollm2_folder, output, max_length=99)
    assert report.records == 3
    assert report.refused == {ROLES: 1, data.SPECIAL_TOKEN: 1}
    listed = [json.loads(line) for line in (output / "refused.jsonl").read_text().splitlines()]
    assert [(item["index"], item["reason"]) for item in listed] == [(2, ROLES), (3, data.SPECIAL_TOKEN)]
    assert "record 2: roles out of order" in report.first_refusals[0]
    with pytest.raises(ValueError, match="record 2: roles out of order"):
        prepare(tmp_path / "talks", smollm2_folder, output, max_length=99, strict=True, overwrite=True)
    assert len(open_training_set(output)) + len(open_training_set(output, split="validation")) == 1


def test_a_template_that_changes_the_text(source: Path, smollm2_folder: Path, tmp_path: Path) -> None:
    upper = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | upper }}<|im_end|>\n{% endfor %}"
    with pytest.raises(ValueError, match=r"not verbatim|not found verbatim"):
        prepare(source, smollm2_folder, tmp_path / "set", max_length=99, chat_template=upper)


def test_what_the_template_rejects_is_counted_as_that(smollm2_folder: Path, tmp_path: Path) -> None:
    talk = as_messages(TALKS[0])
    records = [talk | {"chat_template_kwargs": {"mood": "glad"}}, talk | {"tools": [{}]}, talk]
    (tmp_path / "talks").write_text(lines(records))
    report = prepare(tmp_path / "talks", smollm2_folder, tmp_path / "set", max_length=99, chat_template=TOOLS)
    assert report.refused == {data.REJECTED: 2} and len(report.first_refusals) == 2
    assert "no setting 'mood'" in report.first_refusals[0] and "not a tool" in report.first_refusals[1]


def test_the_progress_line_counts(
    source: Path, smollm2_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(source, smollm2_folder, tmp_path / "set", max_length=99, progress=True)
    assert "3 records, 3 kept, 0 refused" in capsys.readouterr().err


def test_settings_of_the_template(smollm2_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "talks").write_text(lines([as_messages(TALKS[0])]))
    options: dict[str, Any] = {"max_length": 99, "validation_fraction": 0, "chat_template": QWEN3_FIELDS}
    off = prepare(
        tmp_path / "talks", smollm2_folder, tmp_path / "off", chat_template_kwargs={"enable_thinking": False}, **options
    )
    on = prepare(tmp_path / "talks", smollm2_folder, tmp_path / "on", **options)
    assert off.train.loss_tokens == on.train.loss_tokens
    assert off.train.tokens > on.train.tokens, "an empty thought stands in the prompt"


def test_an_answer_without_loss_is_counted(smollm2_folder: Path, tmp_path: Path) -> None:
    thinks = [("user", "2 + 2?"), ("assistant", "<think>\nA sum.\n</think>\n\n4"), *TALKS[0]]
    (tmp_path / "talks").write_text(lines([as_messages(thinks)]))
    report = prepare(tmp_path / "talks", smollm2_folder, tmp_path / "set", max_length=99, chat_template=QWEN3_FIELDS)
    assert report.adjusted == {data.CONTEXT_ONLY: 1}


def test_one_writer_and_no_remains(source: Path, smollm2_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "set"
    with locked(output), pytest.raises(ValueError, match=r"written by another process .pid \d+"):
        prepare(source, smollm2_folder, output, max_length=99)
    (tmp_path / ".set.partial").mkdir()
    (tmp_path / ".set.partial" / "of a killed run").write_text("x")
    prepare(source, smollm2_folder, output, max_length=99)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "talks"]
    with pytest.raises(ValueError, match="is a file"):
        prepare(source, smollm2_folder, source, max_length=99, overwrite=True)


def test_limit(source: Path, smollm2_folder: Path, tmp_path: Path) -> None:
    report = prepare(source, smollm2_folder, tmp_path / "set", max_length=99, limit=2)
    assert report.train.conversations + report.validation.conversations == 2


def test_nothing_appears_if_it_fails(
    source: Path, smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(source, smollm2_folder, tmp_path / "set", max_length=99)
    before = open_training_set(tmp_path / "set").fingerprint

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data.SplitWriter, "add", fail)
    for name in ("set", "new"):
        with pytest.raises(OSError, match=f"No space left on device: .*{name}"):
            prepare(source, smollm2_folder, tmp_path / name, max_length=99, overwrite=True)
    assert open_training_set(tmp_path / "set").fingerprint == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "talks"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_length": 3}, "max_length is 3; allowed"),
        ({"overlong": "wrap"}, "overlong is 'wrap'; allowed: truncate, drop"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
        ({"limit": 0}, "limit is 0"),
    ],
)
def test_bad_settings(options: dict[str, Any], words: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        prepare(source, tmp_path, tmp_path / "set", **{"max_length": 99, **options})


def test_bad_targets_and_outputs(source: Path, smollm2_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        prepare(source, tmp_path / "none", tmp_path / "set", max_length=99)
    (tmp_path / "set").mkdir()
    with pytest.raises(ValueError, match="exists; choose another"):
        prepare(source, smollm2_folder, tmp_path / "set", max_length=99)
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        prepare(source, tmp_path / "set", tmp_path / "other", max_length=99)
