"""The SmolLM2 tokenizer, read once."""

from pathlib import Path
from typing import Any

import pytest

from aquiline.checkpoints.embedded import fetch_embedded
from aquiline.training.data import load_tokenizer


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    return fetch_embedded("smollm2")


@pytest.fixture
def tokenizer(smollm2_folder: Path) -> Any:
    """A fresh one for each test: tests add tokens to it."""
    return load_tokenizer(smollm2_folder)
