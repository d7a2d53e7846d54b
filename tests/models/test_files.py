"""Files appear whole or not at all, and nothing outside a folder is opened."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aquiline.models.files import filling, locked, naming, read_json, replacing, write_text


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
    with pytest.raises(OSError, match="file"), locked(tmp_path / "file" / "set"):
        pass


def test_an_error_without_a_file_gets_one() -> None:
    with pytest.raises(OSError, match=r"No space left on device: .*metrics") as caught, naming(Path("metrics")):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == "metrics"
    with pytest.raises(OSError, match=r"first") as caught, naming(Path("second")):
        raise OSError(errno.EACCES, "Permission denied", "first")


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
