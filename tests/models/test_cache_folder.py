"""A cache folder is made once, whole or not at all."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aquiline.models.cache_folder import build_once, cache_root


def write(text: str):
    def build(folder: Path) -> None:
        (folder / "data").write_text(text)

    return build


def never(folder: Path) -> None:
    raise AssertionError(f"{folder} was built again")


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AQUILINE_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.setenv("AQUILINE_CACHE", "")
    assert cache_root() == Path.home() / ".cache" / "aquiline"


def test_second_call_builds_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "name"
    assert build_once(folder, {"v": 1}, write("a")) == folder
    assert build_once(folder, {"v": 1}, never) == folder
    assert (folder / "data").read_text() == "a"


def test_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "data").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "name", {}, interrupted)
    assert [path.name for path in tmp_path.iterdir()] == [".name.lock"]


def test_killed_build_is_cleared_by_the_next(tmp_path: Path) -> None:
    kill = (
        "import os, pathlib, signal, sys\n"
        "from aquiline.models.cache_folder import build_once\n"
        "def build(folder):\n"
        "    (folder / 'leftover').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "build_once(pathlib.Path(sys.argv[1]), {}, build)\n"
    )
    folder = tmp_path / "name"
    assert subprocess.run([sys.executable, "-c", kill, str(folder)], check=False).returncode == -9
    assert not folder.exists()
    build_once(folder, {}, write("whole"))
    assert sorted(path.name for path in folder.iterdir()) == ["data", "source.json"]
    assert not (tmp_path / ".name.partial").exists()


def test_outdated_or_damaged_folder_is_built_again(tmp_path: Path) -> None:
    folder = tmp_path / "name"
    build_once(folder, {"v": 1}, write("old"))
    build_once(folder, {"v": 2}, write("new"))
    assert (folder / "data").read_text() == "new"
    (folder / "data").write_text("")
    build_once(folder, {"v": 2}, write("mended"))
    assert (folder / "data").read_text() == "mended"
    (folder / "source.json").write_text("[]")
    build_once(folder, {"v": 2}, write("again"))
    assert (folder / "data").read_text() == "again"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".name.lock", "name"]


def test_processes_build_one_after_the_other_and_only_once(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\n"
        "from aquiline.models.cache_folder import build_once\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "def build(folder):\n"
        "    with (root / 'log').open('a') as log:\n"
        "        log.write('built ')\n"
        "    time.sleep(0.5)\n"
        "    (folder / 'data').write_text('whole')\n"
        "folder = build_once(root / 'name', {}, build)\n"
        "assert (folder / 'data').read_text() == 'whole'\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built "


def test_removed_folder_is_built_again(tmp_path: Path) -> None:
    build_once(tmp_path / "name", {}, write("a"))
    shutil.rmtree(tmp_path / "name")
    build_once(tmp_path / "name", {}, write("b"))
    assert (tmp_path / "name" / "data").read_text() == "b"
