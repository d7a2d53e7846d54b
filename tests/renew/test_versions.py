"""Versions of a head: one is always servable, whenever a process is killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aquiline.renew.versions import (
    add_version,
    conclude,
    current,
    events,
    last_candidate,
    record,
    roll_back,
    serve_version,
    versions,
)

KILLED_AT_EACH_STEP = """
import os, signal, sys
from pathlib import Path
from aquiline.renew.versions import add_version, roll_back, serve_version

def swap(folder, head):
    made = add_version(folder, head, 0, {"better": True})
    serve_version(folder, made.number, "swap")
    roll_back(folder, "test")

head, base = Path(sys.argv[1]), Path(sys.argv[2])
for step in range(1000):
    folder = base / str(step)
    serve_version(folder, add_version(folder, head, None).number, "begin")
    child = os.fork()
    if not child:
        left = step
        def count(event, arguments):
            global left
            if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.copyfile", "os.listdir"):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(count)
        swap(folder, head)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        print(step)
        break
"""


@pytest.fixture
def head(tmp_path: Path) -> Path:
    folder = tmp_path / "head"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "README.md"):
        (folder / name).write_text(f'{{"file": "{name}"}}')
    return folder


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_any_step_leaves_a_whole_version(tmp_path: Path, head: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EACH_STEP, str(head), str(tmp_path / "killed")],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    steps = int(done.stdout)
    assert steps > 30, "every access to a file is a step"
    seen = set()
    for step in range(steps + 1):
        served = current(tmp_path / "killed" / str(step))
        assert served is not None
        for file in head.iterdir():
            assert (served.folder / file.name).read_bytes() == file.read_bytes()
        seen.add(served.number)
        later = add_version(tmp_path / "killed" / str(step), head, served.number)
        serve_version(tmp_path / "killed" / str(step), later.number, "swap")
        assert current(tmp_path / "killed" / str(step)) == later
    assert seen == {0, 1}


def test_the_pointer_decides_and_rollback_goes_to_the_parent(tmp_path: Path, head: Path) -> None:
    first = add_version(tmp_path, head, None)
    second = add_version(tmp_path, head, 0, {"reason": "better"})
    assert [version.number for version in versions(tmp_path)] == [0, 1]
    assert current(tmp_path) == second, "the newest, while nothing points"
    serve_version(tmp_path, 0, "begin")
    assert current(tmp_path) == first
    serve_version(tmp_path, 1, "swap")
    assert roll_back(tmp_path, "slower") == 0 and current(tmp_path) == first
    with pytest.raises(ValueError, match=r"the first version.*none to go back to"):
        roll_back(tmp_path, "again")
    with pytest.raises(ValueError, match="version is 7; allowed: 0, 1"):
        roll_back(tmp_path, "x", 7)
    assert roll_back(tmp_path, "asked for", 1) == 1
    assert [event["event"] for event in events(tmp_path)] == ["begin", "swap", "rollback", "rollback"]
    (tmp_path / "current").write_text("nonsense")
    assert current(tmp_path) == second


@pytest.mark.parametrize(("better", "base"), [(True, 0), (False, 0), (True, 7)])
def test_the_gate_decides(tmp_path: Path, head: Path, better: bool, base: int) -> None:
    serve_version(tmp_path, add_version(tmp_path, head, None).number, "begin")
    shutil.copytree(head, tmp_path / "training" / "candidate")
    (tmp_path / "training" / "candidate" / "README.md").write_text("the candidate's card")
    verdict = {"better": better, "reason": "measured", "base": base}
    (tmp_path / "training" / "verdict.json").write_text(json.dumps(verdict))
    (tmp_path / "training" / "log.txt").write_text("trained\n")
    conclude(tmp_path)
    served = current(tmp_path)
    assert served is not None
    if better and not base:
        assert (served.number, served.parent, served.verdict["reason"]) == (1, 0, "measured")
        assert (served.folder / "README.md").read_text() == "the candidate's card"
    else:
        assert served.number == 0 and len(versions(tmp_path)) == 1
    expected = "dropped" if base else "swap" if better else "rejected"
    assert [event["event"] for event in events(tmp_path)] == ["begin", expected]
    assert not (tmp_path / "training").exists() and (tmp_path / "training-log.txt").read_text() == "trained\n"
    assert json.loads((tmp_path / "state.json").read_text())["until"] > served.created


def test_a_torn_event_is_left_out(tmp_path: Path) -> None:
    record(tmp_path, "swap", version=1)
    with (tmp_path / "events.jsonl").open("a") as stream:
        stream.write('{"time": 1, "ev')
    assert [event["version"] for event in events(tmp_path)] == [1]


@pytest.mark.parametrize("damage", ["[1]", "{}", '{"parent": "0", "created": 1, "verdict": {}}', '{"parent": 0'])
def test_a_damaged_version_is_one_error(tmp_path: Path, head: Path, damage: str) -> None:
    made = add_version(tmp_path, head, None)
    shutil.copytree(made.folder, tmp_path / "versions" / "0000.bak")
    assert versions(tmp_path) == [made], "a copy beside the versions is none"
    (made.folder / "version.json").write_text(damage)
    with pytest.raises(ValueError, match=r"version\.json.*remove the version's folder"):
        current(tmp_path)


@pytest.mark.parametrize("damage", ["{}", '{"until": "now"}', '{"until": NaN}', '{"until": 1e999}'])
def test_a_damaged_mark_is_one_error(tmp_path: Path, damage: str) -> None:
    assert last_candidate(tmp_path) == 0.0
    (tmp_path / "state.json").write_text(damage)
    with pytest.raises(ValueError, match=r"state\.json holds no time in seconds; remove it"):
        last_candidate(tmp_path)


@pytest.mark.parametrize(
    "damage", ["3", "{}", '{"time": NaN, "event": "swap"}', '{"time": 1}', "[" * 100_000, "\ud800"]
)
def test_damaged_events_are_left_out(tmp_path: Path, damage: str) -> None:
    (tmp_path / "events.jsonl").write_bytes(f"{damage}\n".encode("utf-8", "surrogatepass"))
    record(tmp_path, "swap", version=1)
    assert [event["version"] for event in events(tmp_path)] == [1]
