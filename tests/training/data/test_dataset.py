"""Training sets on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from aquiline.models.cache_folder import appearing_whole
from aquiline.training.data.dataset import open_training_set
from aquiline.training.data.prepare import prepare
from tests.full_disk import no_file_above
from tests.training.data.talks import as_messages, lines


def test_any_index_of_many_batches(smollm2_folder: Path, tmp_path: Path) -> None:
    talks = [as_messages([("user", f"Say {i}"), ("assistant", f"{i}")]) for i in range(600)]
    (tmp_path / "talks").write_text(lines(talks))
    prepare(tmp_path / "talks", smollm2_folder, tmp_path / "set", max_length=99, validation_fraction=0)
    training = open_training_set(tmp_path / "set")
    for index in (599, 0, 255, 256, 511, 512, 300):
        assert training[index].source == f"talks:{index + 1}"
        assert len(training[index].input_ids) == training.lengths[index]
    assert training[-1].source == "talks:600"
    with pytest.raises(IndexError, match="600"):
        training[600]


def test_a_full_disk_is_named_and_nothing_stays_behind(smollm2_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "talks").write_text(lines(as_messages([("user", f"Say {i}"), ("assistant", f"{i}")]) for i in range(9)))
    for size in (10, 900):
        with no_file_above(size), pytest.raises(OSError, match="File too large") as caught:
            prepare(tmp_path / "talks", smollm2_folder, tmp_path / "set", max_length=99)
        assert caught.value.filename == str(tmp_path / "set")
        assert [path.name for path in tmp_path.iterdir()] == ["talks"]


def test_a_kill_between_two_renames_loses_no_set(tmp_path: Path) -> None:
    (tmp_path / ".set.replaced").mkdir()
    (tmp_path / ".set.replaced" / "train.arrow").write_text("whole")
    with pytest.raises(KeyboardInterrupt), appearing_whole(tmp_path / "set"):
        raise KeyboardInterrupt
    assert (tmp_path / "set" / "train.arrow").read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_bad_training_sets(source: Path, smollm2_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a training set.*`prepare`"):
        open_training_set(tmp_path)
    prepare(source, smollm2_folder, tmp_path / "set", max_length=99, validation_fraction=0)
    with pytest.raises(ValueError, match="prepared for another tokenizer"):
        open_training_set(tmp_path / "set", tokenizer_hash="0" * 64)
    with pytest.raises(ValueError, match="allowed: train, validation"):
        open_training_set(tmp_path / "set", split="test")  # type: ignore[arg-type]
    stored = (tmp_path / "set" / "train.arrow").read_bytes()
    (tmp_path / "set" / "train.arrow").write_bytes(stored[: len(stored) // 2])
    with pytest.raises(ValueError, match="missing or damaged"):
        open_training_set(tmp_path / "set")


def test_both_splits_are_written(smollm2_folder: Path, tmp_path: Path) -> None:
    talks = [as_messages([("user", f"Say {i}"), ("assistant", f"{i}")]) for i in range(40)]
    (tmp_path / "talks").write_text(lines(talks))
    report = prepare(tmp_path / "talks", smollm2_folder, tmp_path / "set", max_length=99, validation_fraction=0.4)
    train = open_training_set(tmp_path / "set")
    validation = open_training_set(tmp_path / "set", split="validation")
    assert len(validation) == report.validation.conversations > 5
    assert len(train) == report.train.conversations > 5
    assert len({example.id for part in (train, validation) for example in part}) == 40
