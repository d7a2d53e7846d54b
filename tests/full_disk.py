"""A disk on which large files do not fit, for any process and without rights of the superuser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
