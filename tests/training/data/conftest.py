"""A file of conversations."""

from pathlib import Path

import pytest

from tests.training.data.talks import TALKS, as_messages, as_sharegpt, lines


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """JSON lines of `TALKS` in two formats; the third line is blank."""
    messages, sharegpt = [as_messages(talk) for talk in TALKS[:2]], [as_sharegpt(talk) for talk in TALKS[2:]]
    (tmp_path / "talks").write_text(lines(messages) + "\n" + lines(sharegpt), encoding="utf-8")
    return tmp_path / "talks"
