"""Files appear whole or not at all, and nothing outside a folder is opened."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aquiline.bench.records import RunLog
from aquiline.checkpoints.open import resolve_head
from aquiline.models.files import check_room, filling, locked, naming, read_json, replacing, write_text
from aquiline.models.resolve import resolve_target
from aquiline.training.data.record_log import RecordLog
from tests.full_disk import no_file_above


def test_an_interrupted_write_leaves_the_previous_file(tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", "old")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a.json") as scratch:
        scratch.write_text("half of the n")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"] and (tmp_path / "a.json").read_text() == "old"
    write_text(tmp_path / "a.json", "nouveau é")
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "nouveau é"


def test_a_second_process_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    output = tmp_path / "folder" / "set"
    code = "import sys, aquiline.models.files as f\nwith f.locked(f.Path(sys.argv[1])): print('in')"
    with locked(output):
        second = subprocess.run([sys.executable, "-c", code, str(output)], capture_output=True, text=True, check=False)
        assert second.returncode and f"pid {os.getpid()}" in second.stderr and "choose another output" in second.stderr
        with (
            pytest.raises(ValueError, match=f"set is being written by another process .pid {os.getpid()}"),
            locked(output),
        ):
            pass
    assert list(output.parent.iterdir()) == [], "the lock's file is removed"
    third = subprocess.run([sys.executable, "-c", code, str(output)], capture_output=True, text=True, check=False)
    assert third.stdout == "in\n"


def test_a_lock_below_a_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file; name another"), locked(tmp_path / "file" / "set"):
        pass


def test_an_error_without_a_file_gets_one() -> None:
    with pytest.raises(OSError, match=r"No space left on device: .*metrics") as caught, naming(Path("metrics")):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == "metrics"
    with pytest.raises(OSError, match=r"first") as caught, naming(Path("second")):
        raise OSError(errno.EACCES, "Permission denied", "first")


def test_a_failed_write_of_any_library_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    tensors = {"x": torch.zeros(9999)}

    def torch_write(scratch: Path) -> None:
        with scratch.open("wb") as file:
            torch.save(tensors, file)

    writes = (torch_write, partial(save_file, tensors), lambda scratch: scratch.write_text("x" * 9999))
    for write in writes:
        with no_file_above(999), pytest.raises(OSError, match="File too large") as caught, replacing(path) as scratch:
            write(scratch)
        assert caught.value.filename == str(path) and list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="other"), naming(path):
        raise RuntimeError("other")
    with pytest.raises(ConnectionResetError, match=r"^.Errno 104. reset$"), naming(path):
        raise ConnectionResetError(errno.ECONNRESET, "reset")


@pytest.mark.parametrize("log", [RecordLog, partial(RunLog, settings={})])
def test_a_line_that_does_not_fit_leaves_no_half(tmp_path: Path, log: Any) -> None:
    path = tmp_path / "log.jsonl"
    lines = log(path)
    append = lines.append if log is RecordLog else partial(lines.append, "record")
    append({"id": "one"})
    before = path.read_bytes()
    with no_file_above(len(before) + 10), pytest.raises(OSError, match=r"log\.jsonl"):
        append({"id": "two", "text": "x" * 999})
    assert path.read_bytes() == before
    append({"id": "three"})
    assert path.read_bytes().startswith(before) and b"three" in path.read_bytes()
    for number in lines.ids if log is RecordLog else ():
        assert number != "two"


def test_room_is_checked_on_the_disk_of_the_output(tmp_path: Path) -> None:
    check_room(tmp_path / "not" / "made", 10)
    with pytest.raises(ValueError, match=r"made needs up to [\d,.]+ MB, [\d,.]+ MB are free; make room"):
        check_room(tmp_path / "not" / "made", 1 << 60)


def test_several_files_appear_together(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    with filling(folder) as scratch:
        (scratch / "config.json").write_text("{}")
        (scratch / "model.safetensors").write_bytes(b"x")
        assert not (folder / "config.json").exists()
    with pytest.raises(OSError, match="disk"), filling(folder) as scratch:
        (scratch / "config.json").write_text("half")
        raise OSError("disk")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert read_json(folder / "config.json") == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[1]", "holds a list, expected an object"),
        (b"[" * 99_999, "not valid JSON"),
    ],
)
def test_json_that_is_no_object(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.json.*{words}.*make it again"):
        read_json(tmp_path / "a.json", "make it again")


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    with replacing(target) as mine:
        mine.write_text("mine")
        left = mine.with_name(mine.name.replace(str(os.getpid()), str(killed.pid)))
        running = mine.with_name(mine.name.replace(str(os.getpid()), str(os.getppid())))
        elsewhere = left.with_name(left.name + "-of-another-machine")
    for file in (left, running, elsewhere):
        file.write_text("partial")
    write_text(target, "again")
    assert sorted(tmp_path.iterdir()) == sorted([target, running, elsewhere])
    folder = tmp_path / "head"
    with filling(folder) as scratch:
        other = scratch.with_name(scratch.name.replace(str(os.getpid()), str(killed.pid)))
    other.mkdir()
    (other / "model.safetensors").write_text("partial")
    with filling(folder) as scratch:
        (scratch / "a").write_text("whole")
    assert [file.name for file in folder.iterdir()] == ["a"]


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    for name in ("n" * 250, "日" * 80):
        with locked(tmp_path / name):
            write_text(tmp_path / name, "text")
        assert (tmp_path / name).read_text() == "text"


def test_names_that_the_system_cannot_look_up(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in (str(tmp_path / "loop"), "n" * 300, "a\0b"):
        for resolve in (resolve_target, resolve_head):
            with pytest.raises(ValueError, match=r"cannot be a file or folder.*check the name"):
                resolve(name)
