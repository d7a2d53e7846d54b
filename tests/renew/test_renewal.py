"""A renewal beside a server: it yields to requests, serves what the gate passed, follows the pointer, rolls back."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from aquiline.checkpoints.eagle.safeailab import write_head
from aquiline.drafters.trees import Chain
from aquiline.engine import watch
from aquiline.loading import Loaded, load
from aquiline.renew import renewal as module
from aquiline.renew.renewal import Renewal, accompany
from aquiline.renew.settings import open_renewal
from aquiline.renew.store import read_store
from aquiline.renew.versions import add_version, current, events, serve_version, versions
from tests import tiny
from tests.tiny_tokenizers import every_byte
from tests.training.tiny_training import write_set, write_target


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("renewal")
    every_byte().save_pretrained(write_target(folder / "target"))
    write_set(folder / "set", 4, 12)
    for seed in (0, 1):
        write_head(folder / f"head{seed}", tiny.head("eagle3", seed=seed), torch.float32)
    return folder


@pytest.fixture(scope="module")
def loaded(base: Path) -> Loaded:
    return load(base / "target", base / "head0", tree=Chain(3), dtype="float32")


@dataclass(eq=False)
class Beside:
    """A renewal whose thread does not run, and its parts."""

    renewal: Renewal
    folder: Path
    loaded: Loaded
    busy: bool = False

    def state(self) -> str:
        """The training process in the words of the kernel: R, S, T (stopped); empty if there is none."""
        process = self.renewal._process
        return "" if process is None else Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def beside(base: Path, loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Beside]:
    monkeypatch.setattr(module, "QUIET", 0.0)
    assert loaded.head is not None
    loaded.swap_head(base / "head0")
    folder = tmp_path / "renewal"
    made = {"data": (str(base / "set"),), "depth": 3}
    open_renewal(folder, base / "target", loaded.head.path, made)
    found = Beside(Renewal(folder, loaded, lambda: found.busy), folder, loaded)
    yield found
    found.renewal.stop()


def stage(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Runs Python code in place of a training stage."""
    monkeypatch.setattr(module, "STAGE", (sys.executable, "-c", code))


def until(condition: object) -> None:
    end = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_request_stops_training_at_once_and_a_long_rush_ends_it(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(monkeypatch, "import time\nwhile True: time.sleep(0.01)")
    renewal = beside.renewal
    renewal.look()
    assert beside.state() == "", "nothing was served"
    (beside.folder / "training").mkdir()
    renewal.look()
    assert beside.state() in "RSD" and renewal.health() == {"version": 0, "training": "running"}
    beside.busy = True
    renewal.look()
    until(lambda: beside.state() == "T")
    assert renewal.health()["training"] == "paused"
    beside.busy = False
    renewal.look()
    until(lambda: beside.state() in "RS")
    beside.busy, renewal._patience = True, 0.001
    renewal.look()
    time.sleep(0.01)
    renewal.look()
    assert beside.state() == "" and (beside.folder / "training").is_dir(), "the run can resume"


def test_each_kill_doubles_the_patience_until_a_stage_ends(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise rushes that return sooner than a stage ends would kill it for ever."""
    stage(monkeypatch, "import time; time.sleep(60)")
    renewal = beside.renewal
    (beside.folder / "training").mkdir()
    for patience in (60, 120, 240):
        for beside.busy in (False, True):
            renewal.look()
        for waited, running in ((patience - 5, True), (10, False)):
            assert renewal._paused_since is not None
            renewal._paused_since -= waited
            renewal.look()
            assert (renewal._process is not None) == running, patience
    stage(monkeypatch, "")
    beside.busy = False
    renewal.look()
    until(lambda: renewal._process is not None and renewal._process.poll() is not None)
    renewal.look()
    assert renewal._patience == module.PATIENCE


def test_enough_new_conversations_start_a_training(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_TOKENS", 30)
    stage(monkeypatch, "import time; time.sleep(60)")
    (output,) = beside.loaded.generate([[5, 6, 7]], max_new_tokens=20, ignore_eos=True)
    beside.renewal.keep(output)
    beside.renewal.look()
    assert beside.renewal.health()["training"] == "idle"
    beside.renewal.keep(beside.loaded.generate([8, 9], max_new_tokens=20, ignore_eos=True))
    beside.renewal._checked = -60.0
    beside.renewal.look()
    assert beside.renewal.health()["training"] == "running"
    assert len(read_store(beside.folder / "conversations")) == 2


def test_a_version_that_another_process_points_to_is_served(
    beside: Beside, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(monkeypatch, "")
    (beside.folder / "training").mkdir()
    assert beside.loaded.head is not None
    first = beside.loaded.head.drafter.head.network.fc.weight
    before = beside.loaded.generate([5, 6, 7], max_new_tokens=20).token_ids
    beside.renewal.look()
    until(lambda: beside.renewal._process is not None and beside.renewal._process.poll() is not None)
    serve_version(beside.folder, add_version(beside.folder, base / "head1", 0).number, "swap")
    beside.renewal.look()
    assert beside.renewal.health() == {"version": 1, "training": "idle"}
    assert beside.loaded.head.path == beside.folder / "versions" / "0001"
    assert not torch.equal(first, beside.loaded.head.drafter.head.network.fc.weight)
    assert beside.loaded.generate([5, 6, 7], max_new_tokens=20).token_ids == before


def test_a_stage_that_fails_is_given_up(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    stage(monkeypatch, "print('what went wrong'); raise SystemExit(3)")
    (beside.folder / "training").mkdir()
    beside.renewal.start()
    until(lambda: [event["event"] for event in events(beside.folder)] == ["begin", "failure"])
    until(lambda: not (beside.folder / "training").exists())
    assert "ended with 3" in events(beside.folder)[-1]["error"]
    assert (beside.folder / "training-log.txt").read_text() == "what went wrong\n"


def test_a_fall_of_acceptance_after_a_swap_takes_the_head_back(
    beside: Beside, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "BLOCK", 4)
    renewal, acceptance = beside.renewal, beside.loaded.watch
    assert beside.loaded.head is not None
    first = beside.loaded.head.drafter.head
    for number in range(400):
        acceptance.record([("head", number % 2 == 0)])
    serve_version(beside.folder, add_version(beside.folder, base / "head1", 0).number, "swap")
    renewal.look()
    assert renewal.health()["version"] == 1
    second = beside.loaded.head.drafter.head
    assert not torch.equal(first.network.fc.weight, second.network.fc.weight)
    for number in range(100):
        acceptance.record([("head", number % 2 == 0)])
        renewal.look()
    assert renewal.health()["version"] == 1, "acceptance is as before"
    for _ in range(100):
        acceptance.record([("head", False)])
    renewal.look()
    assert renewal.health()["version"] == 0 and current(beside.folder) == versions(beside.folder)[0]
    assert torch.equal(first.network.fc.weight, beside.loaded.head.drafter.head.network.fc.weight)
    assert events(beside.folder)[-1]["reason"] == "acceptance fell after the swap"


def test_a_start_serves_the_version_that_was_served_last(beside: Beside, base: Path) -> None:
    serve_version(beside.folder, add_version(beside.folder, base / "head1", 0).number, "swap")
    again = Renewal(beside.folder, beside.loaded, lambda: False)
    assert again.health()["version"] == 1
    again.stop()


def test_what_cannot_be_renewed_is_rejected(beside: Beside, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs an EAGLE head, and plain drafts; give one with --draft"):
        accompany(tmp_path / "new", (), None, beside.loaded.plain(), lambda: False)
    with pytest.raises(ValueError, match="renew_data is missing; give training sets"):
        accompany(tmp_path / "new", (), None, beside.loaded, lambda: False)
    with pytest.raises(ValueError, match="nowhere"):
        accompany(tmp_path / "new", (str(tmp_path / "nowhere"),), None, beside.loaded, lambda: False)
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file', a file; allowed: a folder"):
        accompany(tmp_path / "file", (), None, beside.loaded, lambda: False)


def test_one_server_renews_in_a_folder(beside: Beside, base: Path, tmp_path: Path) -> None:
    made = partial(accompany, tmp_path / "shared", (str(base / "set"),), None, beside.loaded, lambda: False)
    first = made()
    with pytest.raises(ValueError, match=rf"shared is being written by another process \(pid {os.getpid()}\)"):
        made()
    end = threading.Thread(target=first.stop)
    end.start()
    end.join()
    made().stop()
