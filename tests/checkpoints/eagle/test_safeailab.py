"""Heads are written in this package's layout and read back with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aquiline.checkpoints.eagle.safeailab import write_head
from aquiline.checkpoints.open import read_head
from aquiline.targets.rope import RopeConfig
from aquiline.targets.target import TargetShape
from tests import tiny

TINY = TargetShape(vocab_size=tiny.VOCAB, hidden_size=48, num_layers=7, max_positions=256)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle with bias": ("eagle", {"fc_bias": True}),
    "eagle3": ("eagle3", {}),
    "3.1": ("eagle3", {"fc_norm": True, "norm_output": True}),
    "normed": ("eagle3", {"norm_before_fc": True, "norm_before_residual": True}),
    "four features": ("eagle3", {"features": (1, 3, 5, 7)}),
    "two layers": ("eagle3", {"num_layers": 2}),
    "all tokens": ("eagle3", {"draft_vocab_size": tiny.VOCAB}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip(variant: str, tmp_path: Path) -> None:
    kind, changes = VARIANTS[variant]
    head = tiny.head(kind, dtype=torch.float32, **changes)
    head.target_fingerprint, head.gamma, head.window = "f" * 64, 1.7, 96
    write_head(tmp_path / "new", head, torch.float32)
    again = read_head(tmp_path / "new", TINY)
    layer = again.config.layer
    assert again.config.features == head.config.features and again.config.num_layers == head.config.num_layers
    assert (layer.rope.theta, layer.rope.kind) == (10000.0, "default") and again.target_fingerprint == "f" * 64
    assert (again.gamma, again.window) == (1.7, 96)
    state = again.network.state_dict()
    assert state.keys() == head.network.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in head.network.state_dict().items())
    if head.draft_to_target is None:
        assert again.draft_to_target is None
    else:
        assert torch.equal(again.draft_to_target, head.draft_to_target)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["config.json", "model.safetensors"]


def test_written_map_is_the_offset_form(tmp_path: Path) -> None:
    write_head(tmp_path, tiny.head("eagle3", dtype=torch.float32))
    tensors = load_file(tmp_path / "model.safetensors")
    ids = torch.arange(0, tiny.VOCAB, 2)
    assert torch.equal(tensors["d2t"], ids - torch.arange(len(ids))) and tensors["d2t"].dtype == torch.int64
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids) and tensors["t2d"].dtype == torch.bool
    assert tensors["fc.weight"].dtype == torch.bfloat16


def test_rope_is_named_twice_and_keeps_its_scaling(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    head = tiny.head("eagle3", dtype=torch.float32)
    rope = RopeConfig(500000.0, 12, "llama3", scaling, 64)
    object.__setattr__(head.config.layer, "rope", rope)
    write_head(tmp_path, head)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500000.0
    assert config["rope_scaling"]["factor"] == 8.0
    read = read_head(tmp_path, TINY).config.layer.rope
    assert (read.theta, read.kind, read.original_max_positions) == (500000.0, "llama3", 64)
    assert {key: read.scaling[key] for key in scaling} == scaling


def test_a_trainable_network_comes_back(tmp_path: Path) -> None:
    write_head(tmp_path, tiny.head("eagle3", dtype=torch.float32))
    head = read_head(tmp_path, TINY)
    assert all(p.requires_grad and not p.is_meta for p in head.network.parameters())
    with torch.no_grad():
        head.network.fc.weight.zero_()
    assert read_head(tmp_path, TINY).network.fc.weight.abs().sum() > 0
