"""Tokenising: long texts, ids beyond the vocabulary, and the identity of a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aquiline.training.data import prepare as data
from aquiline.training.data import tokens
from aquiline.training.data.dataset import open_training_set
from aquiline.training.data.prepare import prepare
from aquiline.training.data.tokens import tokenizer_hash
from tests.training.data.talks import TALKS, as_messages, lines


def test_a_long_text_is_cut_before_it_is_tokenised(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ["word " * 20_000, "x" * 100_000, "A short one."]
    (tmp_path / "talks").write_text(lines([as_messages([("user", "Go"), ("assistant", text)]) for text in answers]))
    whole = prepare(tmp_path / "talks", smollm2_folder, tmp_path / "whole", max_length=100_000, validation_fraction=0)
    seen: list[int] = []
    real = tokens.tokenized

    def watched(tokenizer: Any, texts: list[str], **options: Any) -> Any:
        seen.extend(len(text) for text in texts)
        return real(tokenizer, texts, **options)

    monkeypatch.setattr(tokens, "tokenized", watched)
    for overlong in ("truncate", "drop"):
        seen.clear()
        cut = prepare(
            tmp_path / "talks",
            smollm2_folder,
            tmp_path / overlong,
            max_length=50,
            overlong=overlong,
            validation_fraction=0,
        )
        assert seen.count(800) == 2, "50 tokens are looked for in 800 characters"
        assert sum(size > 100_000 for size in seen) == 1, "one word without an end cannot be cut"
        assert cut.train.conversations == (3 if overlong == "truncate" else 1)
    for example, full in zip(open_training_set(tmp_path / "truncate"), open_training_set(whole.output), strict=True):
        assert example.input_ids.tolist() == full.input_ids[:50].tolist()


def test_an_id_beyond_the_vocabulary_is_named(source: Path, smollm2_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((smollm2_folder / name).read_bytes())
    (tmp_path / "config.json").write_text('{"vocab_size": 30000}')
    with pytest.raises(ValueError, match=r"talks:1: .* the id \d+, .* below 30000 .vocab_size.*resize"):
        prepare(source, tmp_path, tmp_path / "set", max_length=99)


def test_a_text_on_which_the_tokenizer_fails_is_refused(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talks").write_text(lines([as_messages(talk) for talk in TALKS]))
    real = tokens.tokenized

    def fails(tokenizer: Any, texts: list[str], **options: Any) -> Any:
        if any("sailor" in text for text in texts):
            raise ValueError("the tokenizer fails on this text (too many retries)")
        return real(tokenizer, texts, **options)

    monkeypatch.setattr(tokens, "tokenized", fails)
    report = prepare(tmp_path / "talks", smollm2_folder, tmp_path / "set", max_length=99)
    assert report.refused == {data.BAD_FOR_TOKENIZER: 1}
    assert "talks, record 2" in report.first_refusals[0] and "too many retries" in report.first_refusals[0]


def test_tokenizer_hash_follows_the_vocabulary(tokenizer: Any) -> None:
    before = tokenizer_hash(tokenizer)
    tokenizer.chat_template = None
    assert tokenizer_hash(tokenizer) == before
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_hash(tokenizer) != before
