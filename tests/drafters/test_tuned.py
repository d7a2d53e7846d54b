"""The tuned file: round trips, rejected files, and how `load` follows it."""

import json
from pathlib import Path

import pytest

from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.trees import BareTree, Chain, DynamicTree, StaticTree, TreePolicy
from aquiline.drafters.tuned import TunedChoice, read_tuned, write_tuned
from aquiline.engine.drafting import NamedDrafter, make_drafter
from tests.path_target import PathTarget


@pytest.mark.parametrize(
    "tree", [Chain(3, 0.25), DynamicTree(12, 4, 3, 0.1), StaticTree(((0,), (1,), (0, 0))), DynamicTree]
)
def test_round_trip(tmp_path: Path, tree: TreePolicy | BareTree) -> None:
    choice = TunedChoice("eagle3", "smollm2-eagle3", tree, "abc")
    write_tuned(tmp_path / "tuned.json", choice, {"tokens_per_second": 81.5})
    assert read_tuned(tmp_path / "tuned.json") == choice
    assert json.loads((tmp_path / "tuned.json").read_text())["evidence"] == {"tokens_per_second": 81.5}


def test_load_follows_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, target = tmp_path / "tuned.json", PathTarget(11)
    write_tuned(file, TunedChoice("prompt lookup", "prompt-lookup", Chain(7)), {})
    drafter = make_drafter("auto", file, target, None).drafter
    assert isinstance(drafter, PromptLookup) and drafter.depth == 7
    write_tuned(file, TunedChoice("plain", None, None), {})
    plain = NamedDrafter(None, "plain (tuned: plain)")
    assert make_drafter("auto", str(file), target, None) == plain
    assert not caplog.records
    assert make_drafter("prompt-lookup", str(file), target, None) == plain
    assert "draft prompt-lookup has no effect" in caplog.text


HEAD = '{"format": "aquiline-tuned", "version": 2, "method": "m", "draft": "d", "tree": '


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("{}", "was not written by"),
        ('{"format": "aquiline-tuned", "version": 9}', "of version 9"),
        ('{"format": "aquiline-tuned", "version": 2}', "does not describe a choice"),
        (
            HEAD + '"bush"}',
            "'bush' is not a tree; allowed: chain",
        ),
        (
            HEAD + '"chain:0"}',
            "chain depth is 0",
        ),
        (
            HEAD + '{"kind": "chain"}}',
            "does not describe a choice",
        ),
    ],
)
def test_rejected_files(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "tuned.json").write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_tuned(tmp_path / "tuned.json")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is neither a tree nor a file; .*aquiline tune"):
        read_tuned(tmp_path / "none.json")
