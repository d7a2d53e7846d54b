"""Reads untrusted files safely, and writes new ones whole or not at all.

Models and heads come from strangers, so nothing outside their folder is opened. A written file appears under its name
only when it is complete; a kill at any moment leaves the previous file.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import warnings
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


def check_output(output: Path) -> None:
    """Rejects a name under which no file or folder can be made.

    Raises:
        ValueError: for a name that is too long, a loop of links, a device, or a path below a file.
    """
    user_path(output)
    if output.exists() and not (output.is_file() or output.is_dir()):
        raise ValueError(f"{output} is neither a file nor a folder, and would be replaced; name another output")
    above = next(parent for parent in output.absolute().parents if parent.exists())
    if not above.is_dir():
        raise ValueError(f"{output} cannot be made: {above} is a file; name another output")


def beside(path: Path, role: str) -> Path:
    """Returns the hidden path ``.NAME.ROLE`` beside `path`, with a long name shortened to leave room for more."""
    path = path.absolute()
    name = path.name
    if len(name) > 40:
        name = f"{name[:32]}{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return path.with_name(f".{name}.{role}")


def _scratch(path: Path) -> Path:
    """Returns a hidden path beside `path` for this process, after removing those of dead processes.

    Other machines may write into the same folder; their processes cannot be checked from here.
    """
    stem, here = f"{beside(path, 'partial').name}-", f"@{platform.node()}"
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
        ValueError: if another process holds it; names its pid. Also for names that `check_output` rejects.
    """
    from filelock import FileLock, Timeout

    check_output(output)
    path = beside(output, "lock")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(path), timeout=0, thread_local=False)  # another thread may release it
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


_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EBADF}
"""Errors of a write, not of a connection."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to an error of the system that names no file, such as that of a write to a full disk.

    torch and safetensors raise their own errors for a failed write; these become an `OSError`, too.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        number = _system_error(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def _system_error(error: BaseException | None) -> int | None:
    """Returns the number of the storage error that names no file and is, or led to, this one."""
    while error is not None and not isinstance(error, OSError):
        if found := re.search(r"\(os error (\d+)\)", str(error)):  # as Rust words it
            return int(found[1])
        error = None if error.__cause__ else error.__context__
    return error.errno if error is not None and error.filename is None and error.errno in _STORAGE else None


def check_room(output: Path, wanted: int) -> None:
    """Rejects an output that its disk has no room for, before work is spent on it.

    Args:
        output: file or folder, which need not exist.
        wanted: bytes that the disk must still have.

    Raises:
        ValueError: naming both sizes.
    """
    folder = next(parent for parent in (output.absolute(), *output.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if wanted > free:
        raise ValueError(
            f"{output} needs up to {wanted / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free; make room, or name an output "
            "on a larger disk"
        )


def append_whole(file: int, path: Path, line: bytes) -> None:
    """Appends to an open file; a part that was written before an error is removed.

    Args:
        file: descriptor, opened for appending.
        path: of the file, for the error.

    Raises:
        OSError: if the line does not fit.
    """
    size = os.fstat(file).st_size
    with naming(path):
        try:
            if os.write(file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file)
        except OSError:
            os.ftruncate(file, size)
            raise


@contextmanager
def losing_lines(path: Path) -> Iterator[None]:
    """Turns a failed write of a log line into a warning: the work that the log reports must not end with it."""
    try:
        with naming(path):
            yield
    except OSError as error:
        warnings.warn(f"{path} lacks a line ({error}); make room for the results of the run", stacklevel=4)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a scratch path beside `path`, and moves that file to `path` when the block succeeds.

    An error leaves the previous file untouched and no scratch file; the next process removes the remains of
    a killed one.

    Raises:
        ValueError: if `path` is a device or a pipe, which would be replaced.
    """
    if not path.is_dir():  # which has an error of its own
        check_output(path)
    scratch = _scratch(path)
    try:
        with naming(path):
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
        with naming(folder):
            yield scratch
        for made in sorted(scratch.iterdir(), key=lambda path: (path.name == "config.json", path.name)):
            os.replace(made, folder / made.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
