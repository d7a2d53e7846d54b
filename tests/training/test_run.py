"""Start of a run, and the mistakes that it rejects before it computes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aquiline.cli import main
from aquiline.models.files import locked
from aquiline.training import feature_folder
from aquiline.training import loop as trainer
from aquiline.training.data.dataset import SplitCounts, SplitWriter, open_training_set
from aquiline.training.features import positions_to_keep
from aquiline.training.loop import train
from aquiline.training.metrics import StepReport, append_metrics
from aquiline.training.settings import KINDS, TrainSettings
from aquiline.training.step import TrainingDiverged
from aquiline.training.stream import open_sets
from tests.training.tiny_training import tiny_settings, write_set, write_target


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refusals")
    write_target(folder / "target")
    write_set(folder / "set", conversations=4, length=18)
    return folder


def run(base: Path, output: str, **changes: Any) -> TrainSettings:
    """Two steps."""
    return tiny_settings(base, output, **({"total_positions": 100} | changes))


def with_empty(base: Path, folder: Path, split: str) -> Path:
    """The set without one of its splits' conversations."""
    shutil.copytree(base / "set", folder)
    with SplitWriter(folder / f"{split}.arrow"):
        pass
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["counts"][split] = dataclasses.asdict(SplitCounts())
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_length": 100_000}, r"max_length is 100000; allowed: ≤ \d+, .*; lower it"),
        ({"layers": (1, 99)}, r"unknown target feature 99; allowed: 0 …"),
        ({"validation": ("nowhere",)}, r"nowhere is not a training set"),
    ],
)
def test_what_does_not_fit_the_target_shows_before_the_first_step(
    base: Path, change: dict[str, Any], words: str
) -> None:
    kinds = KINDS if "layers" not in change else ("eagle3",)
    for kind in kinds:
        with pytest.raises(ValueError, match=words):
            train(run(base, "unfit", kind=kind, **change))


def test_a_set_for_another_tokenizer_is_refused(base: Path, tmp_path: Path, smollm2_folder: Path) -> None:
    shutil.copytree(base / "set", tmp_path / "set")
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    (tmp_path / "set" / "manifest.json").write_text(json.dumps(manifest | {"tokenizer_hash": "0" * 64}))
    for data, validation in (("set", base / "set"), (base / "set", "set")):
        paths = [str(tmp_path / data)], [str(tmp_path / validation)]
        with pytest.raises(ValueError, match=r"another tokenizer \(hash 000000000000, .* prepare the conversations"):
            open_sets(smollm2_folder, *paths)


def test_an_empty_validation_split_is_said_first_and_does_not_cost_the_head(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(with_empty(base, tmp_path / "set", "validation"))
    report = train(run(base, "unmeasured", data=(data,)))
    said = capsys.readouterr().out
    assert report.stopped == "finished" and report.acceptance == {}
    assert said.index("no conversation for validation") < said.index("step 1")
    assert "Not measured" in (base / "unmeasured" / "head" / "README.md").read_text()


def test_an_empty_training_split_is_refused(base: Path, tmp_path: Path) -> None:
    data = str(with_empty(base, tmp_path / "set", "train"))
    with pytest.raises(ValueError, match="holds no training conversation of 3 tokens or more"):
        train(run(base, "empty", data=(data,)))


def test_a_run_that_lies_there_is_not_written_over(base: Path) -> None:
    settings = run(base, "there")
    train(settings)
    before = (base / "there" / "checkpoint.pt").read_bytes()
    with pytest.raises(ValueError, match=r"there holds the checkpoint of a run; .*--resume.*--overwrite"):
        train(settings)
    assert (base / "there" / "checkpoint.pt").read_bytes() == before
    lines = (base / "there" / "metrics.jsonl").read_text()
    train(settings, overwrite=True)
    assert len((base / "there" / "metrics.jsonl").read_text().splitlines()) == len(lines.splitlines())


def test_a_resume_in_data_that_was_prepared_again_is_refused(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base / "set", tmp_path / "set")
    settings = run(base, "changed", data=(str(tmp_path / "set"),))
    train(settings)
    shutil.rmtree(tmp_path / "set")
    write_set(tmp_path / "set", conversations=4, length=18, seed=1)
    with pytest.raises(ValueError, match=r"set was prepared again since .*put the set back"):
        train(settings, resume=True)


def test_a_checkpoint_of_an_older_version_is_refused(base: Path) -> None:
    """Checkpoints of Medusa, Hydra and small models held two numbers of progress and no decay."""
    settings = run(base, "older", kind="medusa")
    train(settings)
    path = base / "older" / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    del state["peak"]
    torch.save(state | {"progress": state["progress"][:2]}, path)
    with pytest.raises(ValueError, match=r"older version.*start over in another folder"):
        train(settings, resume=True)


def test_a_head_of_another_kind_is_no_start(base: Path) -> None:
    train(run(base, "first"))
    with pytest.raises(ValueError, match=r"eagle3.*--method eagle3"):
        train(run(base, "second", kind="eagle", init=str(base / "first" / "head")))


def test_a_feature_folder_is_announced_and_must_have_room(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = run(base, "kept", features=str(base / "kept-features"))
    train(settings)
    assert "features in" in capsys.readouterr().out
    data = [open_training_set(base / "set")]
    assert positions_to_keep(data, settings) == min(int(data[0].lengths.sum()), 100 + 60 + 64)

    def full(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=10 if "features" in str(folder) else 1 << 40)

    monkeypatch.setattr(feature_folder.shutil, "disk_usage", full)
    train(settings, resume=True)  # all of it is there
    with pytest.raises(ValueError, match=r"0.00 GB are free; name a folder on a larger disk"):
        train(run(base, "kept-2", features=str(base / "kept-features-2")))


def test_a_resume_may_change_what_moves_no_bit(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk under the feature folder must not cost the run."""
    write_set(tmp_path / "other", conversations=2, length=18, seed=3)
    settings = run(base, "moved", features=str(tmp_path / "one"))
    train(settings, resume=True)
    assert "holds no checkpoint to resume" in capsys.readouterr().out
    changes = {"features": str(tmp_path / "two"), "validation": (str(tmp_path / "other"),), "recompute": True}
    train(dataclasses.replace(settings, **changes), resume=True)
    assert "there is no checkpoint" not in capsys.readouterr().out


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("kind", ["eagle3", "hydra"])
def test_a_diverged_run_says_what_can_be_done(base: Path, kind: str, saved: bool) -> None:
    more = {"regress_positions": 0} if kind == "hydra" else {}
    settings = run(base, f"nan-{kind}-{saved}", kind=kind, **more)
    if saved:
        train(settings)
    start = "--init .*head" if kind == "eagle3" else "another folder with a lower"
    words = f"checkpoint is good: .*{start}.*--lr" if saved else "Nothing was saved yet.*--lr"
    with pytest.raises(TrainingDiverged, match=words):
        train(dataclasses.replace(settings, lr=1e30, muon_lr=0.0), overwrite=True)


def test_a_run_has_one_writer(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", str(base / "set"), "--target", str(base / "target"), "--output", str(base / "held")]
    with locked(base / "held"):
        assert main(command) == 2
    assert f"pid {os.getpid()}" in capsys.readouterr().err and not (base / "held").exists()


def test_a_log_line_that_does_not_fit_costs_no_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()  # stands for any failed write
    with pytest.warns(UserWarning, match=r"metrics\.jsonl lacks a line .*make room"):
        append_metrics(tmp_path, {"step": 1})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_no_success(
    number: signal.Signals,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """`aquiline train … && aquiline export …` must not continue with half a head."""
    # Under nohup, which the tests may run under, SIGHUP is ignored, and training respects that.
    request.addfinalizer(partial(signal.signal, number, signal.signal(number, signal.SIG_DFL)))
    step = trainer.optimiser_step

    def interrupted(run_: Any) -> StepReport:
        signal.raise_signal(number)
        return step(run_)

    monkeypatch.setattr(trainer, "optimiser_step", interrupted)
    command = ["train", str(base / "set"), "--target", str(base / "target"), "--output", str(base / number.name)]
    command += ["--draft-vocab-size", "60", "--max-length", "64", "--batch-positions", "60", "--workers", "1"]
    command += ["--total-positions", "300", "--dtype", "float32"]
    assert main(command) == 128 + number
    assert "--resume" in capsys.readouterr().out
    monkeypatch.undo()
    assert main([*command, "--resume"]) == 0
    assert torch.load(base / number.name / "checkpoint.pt", weights_only=True)["progress"][1] >= 300
