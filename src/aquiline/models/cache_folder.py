"""Replaces folders atomically, and builds cache folders once, in one process at a time."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aquiline.models.files import beside, naming

STAMP_NAME = "source.json"


def cache_root() -> Path:
    """Returns the root of the cache.

    Returns:
        ``$AQUILINE_CACHE`` if it is set and not empty, else ``~/.cache/aquiline``; it need not
        exist yet.
    """
    configured = os.environ.get("AQUILINE_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "aquiline"


@contextmanager
def appearing_whole(output: Path) -> Iterator[Path]:
    """Yields a temporary folder that becomes `output` if the block ends without an error.

    Call it under the lock of `output`: it removes what a killed run left behind.
    """
    partial, old = beside(output, "partial"), beside(output, "replaced")
    if old.exists() and not output.exists():  # killed between the two renames
        old.rename(output)
    for left in (partial, old):
        shutil.rmtree(left, ignore_errors=True)
    try:
        with naming(output):
            partial.mkdir()
            yield partial
            for path in filter(Path.is_file, partial.iterdir()):
                with path.open("rb") as stream:
                    os.fsync(stream.fileno())
            if output.exists():
                output.rename(old)
            partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def build_once(folder: Path, stamp: Mapping[str, Any], build: Callable[[Path], None]) -> Path:
    """Returns `folder`, filled by `build` unless it already matches `stamp`.

    `build` writes into a hidden sibling folder, which is renamed into place when it is complete. An
    interrupted build therefore leaves nothing under the final name, and the next build removes its
    hidden remains. A second process waits for a file lock and then finds the finished folder.

    Args:
        stamp: JSON-serialisable facts that determine the contents (source hash, layout version). A
            folder with another stamp, or with files of a different size, is rebuilt.
        build: fills the empty folder that it receives.

    Returns:
        `folder`.

    Raises:
        OSError: if the cache is not writable (no space, no permission).
    """
    if is_complete(folder, stamp):
        return folder
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(beside(folder, "lock"))):
        if not is_complete(folder, stamp):
            with appearing_whole(folder) as partial:
                build(partial)
                _write_stamp(partial, stamp)
    return folder


def is_complete(folder: Path, stamp: Mapping[str, Any]) -> bool:
    """True if `folder` was built from `stamp` and its files still have their sizes."""
    try:
        written = json.loads((folder / STAMP_NAME).read_text(encoding="utf-8"))
        sizes = written.pop("files")
        intact = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return False
    return intact and written == dict(stamp)


def _write_stamp(folder: Path, stamp: Mapping[str, Any]) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    text = json.dumps({**stamp, "files": sizes}, indent=2) + "\n"
    (folder / STAMP_NAME).write_text(text, encoding="utf-8")
