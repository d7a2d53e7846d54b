"""Reads untrusted files safely, and writes new ones whole or not at all.

Models and heads come from strangers, so nothing outside their folder is opened. A written file appears under its name
only when it is complete; a kill at any moment leaves the previous file.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def read_json(path: Path, remedy: str = "fetch it again") -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        remedy: advice about a broken file, for the message.

    Raises:
        ValueError: if it cannot be read, is not JSON, or does not hold an object.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {remedy}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds a {type(document).__name__}, expected an object; {remedy}")
    return document


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a file in the folder, after checking that it does not lead out of it.

    The blob store beside a model hub snapshot counts as inside: there, all files are links.

    Raises:
        ValueError: if the name contains a folder, a link leaves the folder, or the file is not a regular one.
    """
    if Path(name).name != name or name in ("", ".", "..") or "\\" in name or not name.isprintable() or len(name) > 255:
        raise ValueError(f"{folder}: the file name {name[:80]!r} leaves the folder; expected a plain name")
    path = folder / name
    try:
        real, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"{path} is a link that leads nowhere ({error}); copy the file itself into the folder"
        ) from error
    roots = [home]
    if home.parent.name == "snapshots" and home.parent.parent.name.startswith("models--"):
        roots.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(root) for root in roots):
        raise ValueError(f"{path} is a link that leaves the folder (to {real}); copy the file itself into it")
    if not real.is_file():
        raise ValueError(f"{path} is not a file; fetch it again")
    return path


def user_path(name: str | Path) -> Path:
    """Returns a user's name for a file as a path, after checking that the system can look it up.

    Raises:
        ValueError: for a name that is too long, a loop of links, or a null character.
    """
    path = Path(name).expanduser()
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # The caller reports it.
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{str(path)[:300]!r} cannot be a file or folder ({error}); check the name") from error
    return path


def _scratch(path: Path) -> Path:
    """Returns a hidden path beside `path` for this process, after removing those of dead processes.

    Other machines may write into the same folder; their processes cannot be checked from here.
    """
    name, here = path.name, f"@{platform.node()}"
    if len(name) > 40:  # the longest names leave no room for more
        name = f"{name[:32]}{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    stem = f".{name}.partial-"
    for left in path.parent.glob(f"{glob.escape(stem)}*{glob.escape(here)}"):
        number = left.name.removeprefix(stem).removesuffix(here)
        if number.isdigit() and not _runs(int(number)):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    return path.with_name(f"{stem}{os.getpid()}{here}")


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # somebody else's
    return True


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Holds the lock of an output file or folder, so that no second process writes there.

    Take it before anything is written. Its file ``.NAME.lock`` beside the output is removed at the end.

    Raises:
        ValueError: if another process holds it; names its pid.
    """
    from filelock import FileLock, Timeout

    path = output.absolute().parent / f".{output.absolute().name}.lock"
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(path), timeout=0)
        try:
            lock.acquire()
        except (Timeout, RuntimeError) as error:  # a second lock in one process is a RuntimeError
            holder = path.read_text(encoding="utf-8") if path.exists() else ""
            raise ValueError(
                f"{output} is being written by another process (pid {holder or 'unknown'}); wait for it, or choose "
                "another output"
            ) from error
    try:
        with naming(path):
            path.write_text(str(os.getpid()), encoding="utf-8")
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to an `OSError` that names no file, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a scratch path beside `path`, and moves that file to `path` when the block succeeds.

    An error leaves the previous file untouched and no scratch file; the next process removes the remains of
    a killed one.
    """
    scratch = _scratch(path)
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 text file, whole or not at all."""
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Yields a scratch folder, and moves its files into `folder` when the block succeeds.

    Other files of `folder` stay. config.json moves last: a folder that has it has everything it names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scratch = _scratch(folder / "files")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield scratch
        for made in sorted(scratch.iterdir(), key=lambda path: (path.name == "config.json", path.name)):
            os.replace(made, folder / made.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
