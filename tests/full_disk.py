"""A disk on which large files do not fit, for any process and without rights of the superuser."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Makes the system fail each write, of any library, beyond `size` bytes of a file."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class FullDisk:
    """A disk that fills when a block creates or appends to its n-th file, counted from 1: nothing fits from then on.

    Attributes:
        opened: the files so far that were opened for writing.
    """

    def __init__(self, nth: int) -> None:
        self.nth, self.opened = nth, list[str]()

    @property
    def full(self) -> bool:
        """Whether the disk filled."""
        return len(self.opened) >= self.nth

    def __enter__(self) -> FullDisk:
        _disks.append(self)
        self._limit = no_file_above(0)
        return self

    def opening(self, path: str) -> None:
        """Counts a file; the n-th fills the disk."""
        self.opened.append(path)
        if len(self.opened) == self.nth:
            self._limit.__enter__()

    def __exit__(self, *error: object) -> None:
        _disks.remove(self)
        if self.full:
            self._limit.__exit__(None, None, None)


_disks: list[FullDisk] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _disks or str(arguments[0]).startswith(("/dev/", "/proc/")):
        return
    if arguments[2] & (os.O_WRONLY | os.O_RDWR):
        _disks[-1].opening(str(arguments[0]))


sys.addaudithook(_audit)  # which stays, and does nothing outside a `FullDisk`
