"""The folder that keeps features: what comes back, whom it serves, and what it survives."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aquiline.training.feature_folder import feature_stamp, open_features

STAMP = feature_stamp("target", (2, 3, 4), {"0": "data"}, 64)


def test_what_was_put_comes_back_also_after_reopening(tmp_path: Path) -> None:
    store = open_features(tmp_path, STAMP)
    assert store.layout == (2, 3, 4, "final")
    rows = torch.randn(5, 12).bfloat16()
    store.put("0.7", rows)
    assert torch.equal(store.get("0.7"), rows)  # type: ignore[arg-type]
    store.flush()
    again = open_features(tmp_path, STAMP)
    assert torch.equal(again.get("0.7"), rows)  # type: ignore[arg-type]
    assert again.get("0.8") is None


def test_a_folder_goes_on_with_more_training_sets_and_with_fewer(tmp_path: Path) -> None:
    store = open_features(tmp_path, STAMP)
    store.put("0.7", torch.ones(5, 12))
    store.flush()
    both = feature_stamp("target", (2, 3, 4), {"0": "data", "1": "more"}, 64)
    grown = open_features(tmp_path, both)
    assert "0.7" in grown
    grown.put("1.0", torch.zeros(2, 12))
    grown.flush()
    assert {"0.7", "1.0"} <= set(open_features(tmp_path, STAMP).written)
    with pytest.raises(ValueError, match="after the old ones"):
        open_features(tmp_path, feature_stamp("target", (2, 3, 4), {"0": "more", "1": "data"}, 64))
    assert "1.0" in open_features(tmp_path, both)


def test_an_eagle3_folder_serves_eagle1_but_not_the_other_way(tmp_path: Path) -> None:
    open_features(tmp_path / "three", STAMP)
    plain = feature_stamp("target", ("final",), {"0": "data"}, 64)
    assert open_features(tmp_path / "three", plain).layout == (2, 3, 4, "final")
    open_features(tmp_path / "one", plain)
    with pytest.raises(ValueError, match="features"):
        open_features(tmp_path / "one", STAMP)


@pytest.mark.parametrize(("key", "value"), [("target", "other"), ("data", {"0": "x"})])
def test_a_folder_for_something_else_is_refused(tmp_path: Path, key: str, value: object) -> None:
    open_features(tmp_path, STAMP)
    with pytest.raises(ValueError, match=f"another {key}"):
        open_features(tmp_path, STAMP | {key: value})


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    store = open_features(tmp_path, STAMP)
    store.put("0.1", torch.zeros(3, 4))
    store.flush()
    (shard,) = tmp_path.glob("shard-*.safetensors")
    shard.write_bytes(shard.read_bytes()[:20])
    with pytest.raises(ValueError, match=shard.name):
        open_features(tmp_path, STAMP)


def test_a_full_disk_stops_the_writing_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_features(tmp_path, STAMP)
    store.put("0.1", torch.zeros(3, 4))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    store.flush()
    assert not list(tmp_path.glob("shard-*")) and store.get("0.1") is None
    store.put("0.2", torch.zeros(3, 4))
    assert store.get("0.2") is None
    assert "training continues" in capsys.readouterr().out
