"""The report says what was resolved, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from aquiline.checkpoints.heads import inspect_head
from tests.checkpoints import head_fixtures as fixtures
from tests.checkpoints.head_fixtures import TARGET, VD


def test_without_a_target_the_layers_stay_open(tmp_path: Path) -> None:
    report = inspect_head(fixtures.write(tmp_path, fixtures.modelopt_config(), fixtures.eagle3("layers.0")))
    assert report.config.features == (2, 5, 7) and report.checked_against is None
    config = fixtures.llama_config(draft_vocab_size=VD)
    report = inspect_head(fixtures.write(tmp_path / "b", config, fixtures.eagle3()))
    assert report.config.features == ("low", "middle", "high")
    assert "give a target" in str(report)


def test_every_resolution_is_a_line(tmp_path: Path) -> None:
    folder = fixtures.write(tmp_path, fixtures.modelopt_config(), fixtures.eagle3("layers.0"))
    text = str(inspect_head(folder, TARGET))
    for part in (
        str(folder),
        "EAGLE-3, modelopt checkpoint",
        "config.json, model.safetensors",
        "1 layer(s), hidden 16, MLP 24, 4 heads / 2 KV of 4",
        "float32",
        "base 5000, default scaling",
        "2, 5, 7 (eagle_config ids [1, 4, 6] read as output ids)",
        "12 tokens (d2t read as offsets, t2d agrees)",
        "the target's",
        "fits a target with hidden 16, 40 tokens, 10 layers",
    ):
        assert part in text


def test_too_few_layers_for_the_default(tmp_path: Path) -> None:
    folder = fixtures.write(tmp_path, fixtures.llama_config(draft_vocab_size=VD), fixtures.eagle3())
    with pytest.raises(ValueError, match="at least 7 layers"):
        inspect_head(folder, fixtures.TargetShape(fixtures.V, fixtures.H, 4, 64))
