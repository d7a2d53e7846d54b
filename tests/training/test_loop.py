"""The loop: resuming, features on disk, workers, processes, and what stops it."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from aquiline.checkpoints.open import read_head
from aquiline.drafters.coupled import agreement
from aquiline.drafters.drafter import Rows
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.parallel import ParallelDrafter
from aquiline.drafters.small_model import SmallModel
from aquiline.drafters.trees import Chain
from aquiline.engine.drafting import make_drafter
from aquiline.engine.generate import generate_requests
from aquiline.engine.request import Engine, Request
from aquiline.models.resolve import target_fingerprint
from aquiline.sampling import SamplingParams
from aquiline.targets.loading import load_target
from aquiline.training import loop as trainer
from aquiline.training.data.dataset import open_training_set
from aquiline.training.features import compute_features
from aquiline.training.learners import learner
from aquiline.training.learners.learner import GAMMAS
from aquiline.training.loop import train
from aquiline.training.run import Run
from aquiline.training.settings import EAGLE, KINDS, PARALLEL, TrainSettings, settings_record
from aquiline.training.step import TrainingDiverged
from tests import tiny
from tests.drafters.loop import assert_equal_to_plain, extend, rows_of
from tests.full_disk import FullDisk, no_file_above
from tests.training.tiny_training import metrics, tiny_settings, weights, write_set, write_target


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    write_target(folder / "target")
    write_set(folder / "set", conversations=8, length=18)
    train(tiny_settings(folder, "reference"))
    return folder


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def run_in_process(settings: TrainSettings) -> subprocess.Popen[bytes]:
    code = (
        "import json, sys; from aquiline.training.settings import TrainSettings;"
        "from aquiline.training.loop import train;"
        "s = json.loads(sys.argv[1]);"
        "train(TrainSettings(**{k: tuple(v) if isinstance(v, list) else v for k, v in s.items()}))"
    )
    record = json.dumps(settings_record(settings))
    return subprocess.Popen([sys.executable, "-c", code, record], stdout=subprocess.DEVNULL)


def wait_for_step(output: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(6000):
        there = (output / "checkpoint.pt").is_file() and (output / "metrics.jsonl").is_file()
        if there and any(record["step"] >= step for record in metrics(output)):
            return
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    raise AssertionError("the run did not get to the step")


@pytest.mark.parametrize(("kind", "number"), [("eagle3", signal.SIGKILL), *((kind, signal.SIGTERM) for kind in KINDS)])
def test_a_killed_run_resumes_to_the_same_bits(base: Path, kind: str, number: signal.Signals) -> None:
    # Long enough to be caught in the middle: the kill comes from outside.
    noise = {"feature_noise": 0.01} if kind in EAGLE else {}
    settings = tiny_settings(
        base, f"killed-{kind}-{number.name}", kind, total_positions=3000, save_minutes=0.0, **noise
    )
    process = run_in_process(settings)
    output = Path(settings.output)
    wait_for_step(output, 3, process)
    process.send_signal(number)
    process.wait(60)
    cut = torch.load(output / "checkpoint.pt", weights_only=True)["progress"][0]
    train(settings, resume=True)
    whole = dataclasses.replace(settings, output=settings.output + "-whole", save_minutes=60.0)
    report = train(whole)
    assert 0 < cut < report.steps
    assert same(weights(output), weights(Path(whole.output)))


def test_feature_folder_gives_the_same_bits_as_features_online(base: Path) -> None:
    folder = str(base / "features")
    for output in ("filling", "filled"):
        train(tiny_settings(base, output, features=folder))
        assert same(weights(base / output), weights(base / "reference"))
    other = tiny_settings(base, "other", features=folder, max_length=32)
    with pytest.raises(ValueError, match="max_length"):
        train(other)


@pytest.mark.parametrize("kind", KINDS)
def test_neither_workers_nor_a_feature_folder_change_the_result(base: Path, kind: str) -> None:
    train(tiny_settings(base, f"{kind}-one", kind, total_positions=180))
    kept = base / f"{kind}-kept"
    train(tiny_settings(base, f"{kind}-three", kind, total_positions=180, workers=3, features=str(kept)))
    assert list(kept.glob("shard-*"))
    assert same(weights(base / f"{kind}-one"), weights(base / f"{kind}-three"))


def test_packing_changes_no_more_than_rounding(base: Path) -> None:
    train(tiny_settings(base, "packed", pack=True, muon_lr=0.0, total_positions=60))
    train(tiny_settings(base, "padded", pack=False, muon_lr=0.0, total_positions=60))
    packed, padded = metrics(base / "packed")[0], metrics(base / "padded")[0]
    assert packed["loss"] == pytest.approx(padded["loss"], rel=1e-4)
    assert packed["gradient_norm"] == pytest.approx(padded["gradient_norm"], rel=1e-3)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(base: Path) -> None:
    settings = tiny_settings(base, "diverged", total_positions=120)
    train(settings)
    before = (base / "diverged" / "checkpoint.pt").read_bytes()
    with pytest.raises(TrainingDiverged, match=r"step 2: loss nan.* last checkpoint is good"):
        train(dataclasses.replace(settings, lr=1e38, muon_lr=0.0), overwrite=True)
    assert (base / "diverged" / "checkpoint.pt").read_bytes() == before


def test_a_resume_with_changed_settings_says_which(base: Path) -> None:
    with pytest.raises(ValueError, match=r"lr: 0.003 → 0.5; ttt_steps|ttt_steps.*lr: 0.003 → 0.5"):
        train(tiny_settings(base, "reference", lr=0.5, ttt_steps=2), resume=True)


def stop_after_a_step(run: Run) -> bool:
    run.stopped = "SIGTERM" if run.step else ""
    return bool(run.stopped)


def test_a_full_disk_leaves_the_previous_checkpoint(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The small head and its card are saved, and the error names the file; a stopped run is no success."""
    settings = tiny_settings(base, "full", total_positions=120)
    train(settings)
    checkpoint, head = base / "full" / "checkpoint.pt", base / "full" / "head"
    before = checkpoint.read_bytes()
    shutil.rmtree(head)
    with no_file_above(len(before) - 1):
        assert train(settings, overwrite=True).stopped == "finished"
        assert read_head(head, load_target(base / "target", torch.float32).shape) and (head / "README.md").is_file()
        monkeypatch.setattr(trainer, "_heed", stop_after_a_step)
        with pytest.raises(OSError, match="File too large") as caught:
            train(settings, overwrite=True)
    assert caught.value.filename == str(checkpoint) and checkpoint.read_bytes() == before
    assert sorted(path.name for path in checkpoint.parent.iterdir()) == ["checkpoint.pt", "head", "metrics.jsonl"]
    assert f"could not save: [Errno 27] File too large: '{checkpoint}'" in capsys.readouterr().out


def test_a_head_that_does_not_fit_is_named_at_the_end(base: Path) -> None:
    settings = tiny_settings(base, "nothing-fits", total_positions=120)
    with no_file_above(20_000), pytest.raises(OSError, match="File too large") as caught:
        train(settings)
    assert caught.value.filename == str(base / "nothing-fits" / "head")
    assert [record["step"] for record in metrics(base / "nothing-fits")][-1] == 2, "all of it was done"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_disk_that_fills_at_any_file_ends_in_one_error_and_costs_no_earlier_work(base: Path) -> None:
    output, settings = base / "fills", tiny_settings(base, "fills", total_positions=60)

    def run(nth: int) -> FullDisk:
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(base / "reference", output)
        with redirect_stdout(io.StringIO()), warnings.catch_warnings(), FullDisk(nth) as disk:
            warnings.simplefilter("ignore", UserWarning)  # for lines of the log
            train(settings, overwrite=True)
        return disk

    run(1000)
    before, after, ended, nth = contents(base / "reference"), contents(output), False, 0
    while not ended:
        nth += 1
        try:
            ended = not run(nth).full
        except OSError as error:
            assert str(base) in str(error.filename) and error.errno == errno.EFBIG
        found = contents(output)
        assert found.keys() == before.keys(), "a file is lost, or a half one stays"
        assert json.loads(found["head/config.json"])  # that of a save before validation holds no acceptance
        for name in set(found) - {"metrics.jsonl", "head/config.json"}:
            assert found[name] in (before[name], after[name]), (nth, name)
        assert all(json.loads(line) for line in found["metrics.jsonl"].splitlines())
    assert nth > 8 and before["checkpoint.pt"] != after["checkpoint.pt"]


class Full(io.StringIO):
    """Standard output in a file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_log_on_a_full_disk_costs_its_lines_alone(base: Path) -> None:
    output = base / "mute"
    output.mkdir()
    old = json.dumps({"step": 0, "text": "x" * 2_000_000}) + "\n"
    (output / "metrics.jsonl").write_text(old)
    settings = tiny_settings(base, "mute", total_positions=120)
    with (
        no_file_above(len(old) + 20),
        pytest.warns(UserWarning, match=r"(metrics\.jsonl|standard output) lacks a line .*make room"),
        redirect_stdout(Full()),
    ):
        assert train(settings).stopped == "finished"
    assert (output / "metrics.jsonl").read_text() == old and (output / "head" / "config.json").is_file()


def test_a_disk_without_room_for_two_checkpoints_shows_before_the_first_step(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (base / "reference" / "checkpoint.pt").stat().st_size
    settings = tiny_settings(base, "small-disk", total_positions=120)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 * size))
    with pytest.raises(ValueError, match=r"small-disk needs up to [\d.]+ MB, .*larger disk"):
        train(settings)
    assert list((base / "small-disk").iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=4 * size))
    train(settings)


@pytest.mark.parametrize("kind", KINDS)
def test_decay_can_be_asked_for_by_a_file(base: Path, kind: str) -> None:
    output = base / f"early-{kind}"
    output.mkdir()
    (output / "decay").write_text("180")
    report = train(tiny_settings(base, output.name, kind, total_positions=100_000))
    assert 180 <= report.positions < 300
    factors = [r["lr_factor"] for r in metrics(output) if "lr_factor" in r]
    assert factors[-1] < 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_measured_meanwhile_and_leaves_a_card_and_a_drafter(base: Path, kind: str) -> None:
    settings = tiny_settings(base, f"whole-{kind}", kind, validate_positions=200)
    report = train(settings)
    output = base / f"whole-{kind}"
    measured = [record for record in metrics(output) if "alpha" in record]
    assert len(measured) >= 3 and measured[0]["positions"] < report.positions
    depths = 3 if kind in PARALLEL else 5
    last, card = measured[-1], (output / "head" / "README.md").read_text()
    assert len(last["alpha"]) == depths and 1 <= last["tau_chain5"] <= depths + 1
    assert f"| {last['alpha'][0]:.3f} |" in card and f"τ chain of {depths}" in card
    fingerprint = target_fingerprint(base / "target")
    assert f"Target fingerprint: `{fingerprint}`" in card and f'"kind": "{kind}"' in card
    assert str(base) not in card and '"target": "target"' in card, "a published card names no folder of its author"
    target = load_target(base / "target", torch.float32)
    made = make_drafter(str(output / "head"), None, target, base / "target")
    drafter, name = made.drafter, made.name
    assert drafter is not None and kind.replace("-", " ") in name.replace("-", " ")
    assert_equal_to_plain(target, drafter, tiny.prompts(3, seed=8), SamplingParams())
    gamma = max(last["coupled"], key=last["coupled"].__getitem__)
    assert drafter._coupling.gamma == float(gamma) and f"γ = {gamma} is stored" in card
    if isinstance(drafter, EagleDrafter):  # it never sees more than the longest text of its training
        assert drafter.head.window == settings.max_length // 2
    assert all(0 < share <= 1 for share in last["coupled"].values())
    if isinstance(drafter, ParallelDrafter):  # the measured ranks decide the default tree
        assert len(drafter.heads.config.accuracies) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_measured_agreement_is_that_of_the_drafter(base: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The races that validation evaluates are those of the drafter's logits with the target's at the same token."""
    monkeypatch.setattr(learner, "_COUPLED_EVERY", 1)
    train(tiny_settings(base, f"raced-{kind}", kind, total_positions=120))
    output = base / f"raced-{kind}"
    target = load_target(base / "target", torch.float32)
    drafter = make_drafter(str(output / "head"), None, target, base / "target", packed=False).drafter
    assert isinstance(drafter, EagleDrafter | ParallelDrafter | SmallModel)
    first: list[Tensor] = []

    def record(logits: Tensor, rows: Rows, depth: int) -> Tensor:
        if depth == 1:
            first.append(logits.reshape(1, -1))
        return logits

    gamma, ids = drafter._coupling.gamma, drafter._coupling._tokens
    monkeypatch.setattr(drafter, "_coupling", record)
    said = []
    for row in open_training_set(base / "set", split="validation"):
        tokens, begin = torch.tensor(row.input_ids).long(), int(row.loss_mask.argmax())
        features = compute_features(target, tokens, drafter.needs.features or ("final",))[None]
        logits = target.project(compute_features(target, tokens, ("final",)))
        for end in range(begin + (kind in PARALLEL), len(tokens)):  # the drafted token
            state, text = drafter.new_state(1, 64), tokens[:end].tolist()
            extend(drafter, state, 0, text, features[:, : end - 1])
            drafter.propose(rows_of(text), state)
            said.append(logits[end - 1])
    measured = metrics(output)[-1]["coupled"]
    found = agreement(torch.cat(first), torch.stack(said), GAMMAS, None if ids is None else torch.tensor(ids).long())
    assert measured == pytest.approx(dict(zip(measured, found.mean(-1).tolist(), strict=True)), abs=0.005)
    assert gamma == max(GAMMAS, key=lambda value: measured[f"{value:g}"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls(base: Path, kind: str) -> None:
    more = {"regress_positions": 0} if kind in PARALLEL else {}
    train(tiny_settings(base, f"falls-{kind}", kind, total_positions=1500, lr=0.01, draft_vocab_size=97, **more))
    losses = [record["loss"] for record in metrics(base / f"falls-{kind}") if "loss" in record]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


def engine_acceptance(folder: Path) -> tuple[list[int], list[int]]:
    """Accepted and offered drafts by depth, where the engine answers the training prompts."""
    target = load_target(folder / "target", torch.float32)
    head = read_head(folder / "run" / "head", target.shape)
    head.network.load_state_dict(weights(folder / "run"))  # the head's file is rounded
    engine = Engine(target, EagleDrafter(head, target, Chain(3)), None, ())
    accepted, offered = [0] * 3, [0] * 3
    for row in open_training_set(folder / "set"):
        start = int(row.loss_mask.argmax())
        prompt, answer = row.input_ids[:start].tolist(), row.input_ids[start:].tolist()
        params = SamplingParams(max_new_tokens=len(answer) - 4)
        (output,) = generate_requests(engine, [Request(prompt, params)])
        assert list(output.token_ids) == answer[: len(answer) - 4]
        for depth, (a, o) in enumerate(zip(output.stats.accepted_at, output.stats.offered_at, strict=True)):
            accepted[depth] += a
            offered[depth] += o
    return accepted, offered


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_overfitting_reaches_every_depth(base: Path, tmp_path: Path, kind: str) -> None:
    # Sharp distributions: with flat ones a soft loss leaves the order of near ties open.
    write_target(tmp_path / "target", sharpness=4.0)
    write_set(tmp_path / "set", conversations=6, length=16, seed=5)
    # The validation split is made of the training conversations: this is about fitting.
    shutil.copy(tmp_path / "set" / "train.arrow", tmp_path / "set" / "validation.arrow")
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    manifest["counts"]["validation"] = manifest["counts"]["train"]
    (tmp_path / "set" / "manifest.json").write_text(json.dumps(manifest))
    settings = tiny_settings(
        tmp_path,
        "run",
        kind,
        draft_vocab_size=97,
        batch_positions=70,
        micro_positions=140,
        lr=6e-3,
        total_positions=14_000,
        decay_share=0.7,
        log_steps=1000,
        validate_positions=10**9,
    )
    report = train(settings)
    (alphas,) = report.acceptance.values()
    assert min(alphas[:3]) >= 0.98, alphas
    accepted, offered = engine_acceptance(tmp_path)
    # Of some 20 chains, one may miss: which one does depends on the machine's rounding in training.
    assert all(a >= min(0.98 * o, o - 1) for a, o in zip(accepted, offered, strict=True)), (accepted, offered)
