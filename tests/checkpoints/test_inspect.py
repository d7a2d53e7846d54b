"""The report says what was resolved, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aquiline.checkpoints.final_heads import build_final_network, write_final_heads
from aquiline.checkpoints.heads import inspect_head
from aquiline.checkpoints.target_shape import target_shape
from aquiline.cli import main
from aquiline.drafters.parallel import ParallelHeads
from aquiline.drafters.parallel_network import ParallelConfig
from aquiline.targets.target import TargetShape
from tests.checkpoints import head_fixtures as fixtures
from tests.checkpoints.head_fixtures import TARGET, VD


def test_without_a_target_the_layers_stay_open(tmp_path: Path) -> None:
    report = inspect_head(fixtures.write(tmp_path, fixtures.modelopt_config(), fixtures.eagle3("layers.0")))
    assert report.config.features == (2, 5, 7) and report.checked_against is None
    config = fixtures.llama_config(draft_vocab_size=VD)
    report = inspect_head(fixtures.write(tmp_path / "b", config, fixtures.eagle3()))
    assert report.config.features == ("low", "middle", "high")
    assert "give a target" in str(report)


def test_every_resolution_is_a_line(tmp_path: Path) -> None:
    folder = fixtures.write(tmp_path, fixtures.modelopt_config(), fixtures.eagle3("layers.0"))
    text = str(inspect_head(folder, TARGET))
    for part in (
        str(folder),
        "EAGLE-3, modelopt checkpoint",
        "config.json, model.safetensors",
        "1 layer(s), hidden 16, MLP 24, 4 heads / 2 KV of 4",
        "float32",
        "base 5000, default scaling",
        "2, 5, 7 (eagle_config ids [1, 4, 6] read as output ids)",
        "12 tokens (d2t read as offsets, t2d agrees)",
        "the target's",
        "fits a target with hidden 16, 40 tokens, 10 layers",
    ):
        assert part in text


def test_too_few_layers_for_the_default(tmp_path: Path) -> None:
    folder = fixtures.write(tmp_path, fixtures.llama_config(draft_vocab_size=VD), fixtures.eagle3())
    with pytest.raises(ValueError, match="at least 7 layers"):
        inspect_head(folder, fixtures.TargetShape(fixtures.V, fixtures.H, 4, 64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, r"hidden_size = None, expected a number ≥ 1"),
        ({"vocab_size": -1}, r"vocab_size = -1, expected a number ≥ 1"),
        ({"num_hidden_layers": True}, r"num_hidden_layers = True, expected a number ≥ 1"),
        ({"max_position_embeddings": "x"}, r"max_position_embeddings = 'x', expected a number ≥ 1"),
        ({"text_config": [1]}, r"text_config = \[1\], expected an object"),
    ],
)
def test_a_target_without_sizes(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 10}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert target_shape(tmp_path) == TargetShape(40, 16, 10, 2048)
    (tmp_path / "config.json").write_text(json.dumps(sizes | changes))
    with pytest.raises(ValueError, match=message) as caught:
        target_shape(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def _medusa(folder: Path) -> Path:
    config = ParallelConfig("medusa", 2, 16, 40, 40)
    write_final_heads(folder, ParallelHeads(build_final_network(config), None, None), torch.float32)
    return folder


def test_medusa_heads_are_no_eagle_head(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds Medusa or Hydra heads \(aquiline-final-heads-1\), not an EAGLE head"):
        inspect_head(_medusa(tmp_path))


@pytest.mark.parametrize("to", [torch.int32, torch.float32])
def test_medusa_heads_are_read_without_a_target_too(
    to: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _medusa(tmp_path)
    assert main(["inspect", str(folder)]) == 0 and "against itself only" in capsys.readouterr().out
    tensors = load_file(folder / "model.safetensors")
    first = next(iter(tensors))
    tensors[first] = torch.full_like(tensors[first], torch.nan).to(to)
    save_file(tensors, folder / "model.safetensors")
    assert main(["inspect", str(folder)]) == 2
    said = "expected floating point" if to == torch.int32 else "holds NaN"
    assert f"{folder}: {first}" in (error := capsys.readouterr().err) and said in error
