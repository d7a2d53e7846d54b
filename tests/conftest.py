"""Settings and fixtures for all tests."""

from pathlib import Path

import pytest
import torch

from aquiline.models.embedded import fetch_embedded

# Tiny models gain nothing from threads, and on a busy machine spinning threads cost tenfold.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real default target. Fetched if need be: a test that wants it fails without it."""
    return fetch_embedded("smollm2")
