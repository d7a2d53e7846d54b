"""Files appear whole or not at all, and nothing outside a folder is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from aquiline.models.files import filling, read_json, replacing, write_text


def test_an_interrupted_write_leaves_the_previous_file(tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", "old")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a.json") as scratch:
        scratch.write_text("half of the n")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"] and (tmp_path / "a.json").read_text() == "old"
    write_text(tmp_path / "a.json", "nouveau é")
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "nouveau é"


def test_several_files_appear_together(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    with filling(folder) as scratch:
        (scratch / "config.json").write_text("{}")
        (scratch / "model.safetensors").write_bytes(b"x")
        assert not (folder / "config.json").exists()
    with pytest.raises(OSError, match="disk"), filling(folder) as scratch:
        (scratch / "config.json").write_text("half")
        raise OSError("disk")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert read_json(folder / "config.json") == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[1]", "holds a list, expected an object"),
        (b"[" * 99_999, "not valid JSON"),
    ],
)
def test_json_that_is_no_object(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.json.*{words}.*make it again"):
        read_json(tmp_path / "a.json", "make it again")
