"""A candidate's stages: killed and resumed, and a poisoned store that changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from aquiline.checkpoints.eagle.safeailab import write_head
from aquiline.models.files import write_text
from aquiline.renew.settings import open_renewal, read_settings
from aquiline.renew.slices import NEWEST, NICENESS, ORIGINAL_SHARE, advance, train_settings
from aquiline.renew.store import ConversationStore
from aquiline.renew.versions import current, events
from aquiline.training.data.dataset import open_training_set
from tests import tiny
from tests.command_line import call
from tests.tiny_tokenizers import every_byte
from tests.training.tiny_training import weights, write_set, write_target

TRAIN = {
    "max_length": 64, "batch_positions": 60, "micro_positions": 60, "total_positions": 1200, "warmup_positions": 60,
    "ttt_steps": 2, "dtype": "float32", "save_minutes": 0.0, "log_steps": 1,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A renewal whose store holds random tokens."""
    every_byte().save_pretrained(write_target(tmp_path / "target"))
    write_set(tmp_path / "set", 4, 12)
    write_head(tmp_path / "head", tiny.head("eagle3"), torch.float32)
    made = {"data": (str(tmp_path / "set"),), "depth": 3, "dtype": "float32"}
    open_renewal(tmp_path / "renewal", tmp_path / "target", tmp_path / "head", made)
    settings = json.loads((tmp_path / "renewal" / "settings.json").read_text()) | {"train": TRAIN}
    write_text(tmp_path / "renewal" / "settings.json", json.dumps(settings))
    store, generator = ConversationStore(tmp_path / "renewal" / "conversations"), np.random.default_rng(0)
    for _ in range(70):
        tokens = generator.integers(0, tiny.VOCAB, 20).tolist()
        store.add(tokens[:6], tokens[6:])
    return tmp_path / "renewal"


def test_a_killed_run_resumes_and_a_poisoned_store_changes_no_head(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advance(folder) == "set"
    made = {split: open_training_set(folder / "training" / "set", split=split) for split in ("train", "validation")}
    assert [len(each) for each in made.values()] == [56, 14], "the newest are held out"
    assert made["train"][0].loss_mask.tolist() == [False] * 6 + [True] * 14
    settings = train_settings(folder, read_settings(folder))
    assert (
        settings.data_weights[0] / sum(settings.data_weights) == pytest.approx(ORIGINAL_SHARE) and ORIGINAL_SHARE >= 0.3
    )
    assert settings.init == str(folder / "versions" / "0000") and settings.workers == 1
    stage = [sys.executable, "-m", "aquiline.renew.slices", str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(stage, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    end = time.monotonic() + 300
    while not (folder / "training" / "run" / "checkpoint.pt").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) >= NICENESS > 0
    group = Path(f"/proc/{process.pid}/autogroup")
    assert not group.is_file() or not group.read_text() or group.read_text().endswith(f"nice {NICENESS}\n")
    process.kill()
    process.wait()
    served = current(folder)
    assert served is not None and served.number == 0
    weights(folder / "training" / "run")  # whole
    assert advance(folder) == "train"
    heads = [folder / "versions" / "0000", folder / "training" / "run" / "head", folder / "training" / "candidate"]
    old, new, mean = (load_file(head / "model.safetensors")["fc.weight"].float() for head in heads)
    assert 0 < (mean - (old + new) / 2).norm() < 0.3 * (mean - new).norm(), "but for rounding to bfloat16"
    assert "the mean of the trained head" in (heads[2] / "README.md").read_text()
    found = json.loads(call(capsys, "renew", folder, "--json").out)
    assert found["current"] == 0 and found["training"] and found["store"]["conversations"] == 70
    assert found["store"]["new_answer_tokens"] == 70 * 14
    assert advance(folder) == "gate"
    verdict = events(folder)[-1]
    assert verdict["event"] == "rejected" and "not clearly better" in verdict["reason"]
    assert not (folder / "training").exists()
    shown = call(capsys, "renew", folder).out
    assert "new answers: 0 tokens of the 30,000" in shown and "rejected: not clearly better" in shown
    refused = call(capsys, "renew", folder, "--rollback", -3)
    assert refused.code == 2 and "version is -3; allowed: 0" in refused.error


def test_the_newest_conversations_are_trained_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert NEWEST > 0
    monkeypatch.setattr("aquiline.renew.slices.NEWEST", 100)
    store = ConversationStore(folder / "conversations")
    for token in range(10):
        store.add([token], [token] * 19)
    advance(folder)
    train = open_training_set(folder / "training" / "set")
    assert len(train) == 5, "100 tokens before the 16 that are held out"


def test_settings_outlive_a_start_and_name_their_target(folder: Path, tmp_path: Path) -> None:
    kept = read_settings(folder)
    again = open_renewal(folder, tmp_path / "target", tmp_path / "head", {"data": (), "depth": 3, "dtype": "float32"})
    assert again == replace(kept, data=again.data) and again.data == (str((tmp_path / "set").resolve()),)
    every_byte().save_pretrained(write_target(tmp_path / "other", sharpness=2.0))
    with pytest.raises(ValueError, match=r"renews a head of .*target, another target; choose another folder"):
        open_renewal(folder, tmp_path / "other", tmp_path / "head", {"data": (), "depth": 3})
    with pytest.raises(ValueError, match=r"holds no renewal; make one with"):
        read_settings(tmp_path / "nowhere")


def test_what_no_target_said_is_left_out(folder: Path) -> None:
    store = ConversationStore(folder / "conversations")
    for odd in (-1, tiny.VOCAB, 2**40):
        store.add([1, 2], [3, 4, 5, odd])
    assert advance(folder) == "set"
    made = [open_training_set(folder / "training" / "set", split=split) for split in ("train", "validation")]
    assert sum(len(each) for each in made) == 70
    for file in (folder / "conversations").iterdir():
        file.unlink()
    (folder / "training" / "set" / "manifest.json").unlink()
    with pytest.raises(ValueError, match="holds no conversation of at most 2048 tokens"):
        advance(folder)


@pytest.mark.parametrize(
    "change", [{"depth": "3"}, {"data": "set"}, {"data": [1]}, {"new": 1}, {"target": None}, {"train": []}]
)
def test_damaged_settings_are_one_error(folder: Path, change: dict[str, object]) -> None:
    kept = json.loads((folder / "settings.json").read_text())
    write_text(folder / "settings.json", json.dumps(kept | change))
    with pytest.raises(
        ValueError, match=rf"settings\.json has a wrong {next(iter(change))}; begin a renewal in another"
    ):
        read_settings(folder)
