"""Published Medusa and Hydra checkpoints, against their formulas written out."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from aquiline.checkpoints.open import open_head
from aquiline.checkpoints.parallel import heads_from_stored
from aquiline.decode import Occupant, new_state, prefill, step
from aquiline.drafters.parallel import ParallelDrafter
from aquiline.drafters.trees import Chain, StaticTree
from aquiline.engine.drafting import make_drafter
from aquiline.stats import GenerationStats
from aquiline.targets.target import TargetShape
from tests import tiny

H, V, HEADS = 48, tiny.VOCAB, 3
TARGET = TargetShape(V, H, 7, 256)


def _random(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def medusa(layers: int = 1) -> dict[str, Tensor]:
    """`nn.ModuleList([Sequential(*([ResBlock] * layers), Linear(no bias))] * heads)`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(HEADS):
        shapes |= {f"{i}.0.linear.weight": (H, H), f"{i}.0.linear.bias": (H,), f"{i}.{layers}.weight": (V, H)}
    tensors = _random(shapes)
    for i in range(HEADS):
        for j in range(1, layers):  # one module under several names
            for part in ("weight", "bias"):
                tensors[f"{i}.{j}.linear.{part}"] = tensors[f"{i}.0.linear.{part}"]
    return tensors


def hydra(*, grounded: bool = True) -> dict[str, Tensor]:
    """`hydra_mlp` and `hydra_lm_head` with two layers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(HEADS):
        width = (i + 2) * H if grounded else H
        shapes |= {f"hydra_mlp.{i}.0.linear.weight": (H, width), f"hydra_mlp.{i}.0.linear.bias": (H,)}
        if grounded:
            shapes |= {f"hydra_mlp.{i}.0.res_connection.weight": (H, width)}
            shapes |= {f"hydra_mlp.{i}.0.res_connection.bias": (H,)}
        shapes |= {f"hydra_mlp.{i}.1.linear.weight": (H, H), f"hydra_mlp.{i}.1.linear.bias": (H,)}
        shapes |= {f"hydra_lm_head.{i}.weight": (V, H), f"hydra_lm_head.{i}.bias": (V,)}
    return _random(shapes)


def _folder(path: Path, name: str, tensors: dict[str, Tensor], **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"base_model_name_or_path": "some/target"} | config))
    torch.save(tensors, path / name)
    return path


def _medusa(path: Path, layers: int = 1, **changes: Any) -> Path:
    settings = {"medusa_num_heads": HEADS, "medusa_num_layers": layers} | changes
    return _folder(path, "medusa_lm_head.pt", medusa(layers), **settings)


def _hydra(path: Path, *, grounded: bool = True, **changes: Any) -> Path:
    settings = {"hydra_num_heads": HEADS, "hydra_num_layers": 2, "hydra_head_arch": "mlp", "grounded_heads": grounded}
    return _folder(path, "hydra_lm_head.pt", hydra(grounded=grounded), **(settings | changes))


@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_formula(layers: int, tmp_path: Path) -> None:
    heads = heads_from_stored(open_head(_medusa(tmp_path, layers), TARGET).contents, torch.float32)
    given, x = medusa(layers), torch.randn(2, H)
    for i in range(HEADS):
        y = x
        for _ in range(layers):
            y = y + silu(y @ given[f"{i}.0.linear.weight"].T + given[f"{i}.0.linear.bias"])
        torch.testing.assert_close(heads.network.stream(i, x), y @ given[f"{i}.{layers}.weight"].T)


@pytest.mark.parametrize("grounded", [False, True])
def test_hydra_formula(grounded: bool, tmp_path: Path) -> None:
    heads = heads_from_stored(open_head(_hydra(tmp_path, grounded=grounded), TARGET).contents, torch.float32)
    given, x, tokens = hydra(grounded=grounded), torch.randn(2, H), torch.randn(2, HEADS, H)
    for i in range(HEADS):
        block = {n.removeprefix(f"hydra_mlp.{i}."): t for n, t in given.items()}
        read = torch.cat((x, tokens[:, : i + 1].flatten(1)), 1) if grounded else x
        y = silu(read @ block["0.linear.weight"].T + block["0.linear.bias"])
        y = y + (read @ block["0.res_connection.weight"].T + block["0.res_connection.bias"] if grounded else read)
        y = y + silu(y @ block["1.linear.weight"].T + block["1.linear.bias"])
        expected = y @ given[f"hydra_lm_head.{i}.weight"].T + given[f"hydra_lm_head.{i}.bias"]
        arguments = (i, x, tokens[:, : i + 1]) if grounded else (i, x)
        torch.testing.assert_close(heads.network.stream(*arguments), expected)


@pytest.mark.oracle
@pytest.mark.parametrize("make", [_medusa, _hydra, partial(_hydra, grounded=False)])
@pytest.mark.parametrize("tree", [Chain(3), StaticTree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))])
def test_output_is_plain_decoding(make: Any, tree: Any, tmp_path: Path) -> None:
    target = tiny.decoder("llama")
    drafter = make_drafter(open_head(make(tmp_path), target.shape), tree, target, None).drafter
    assert isinstance(drafter, ParallelDrafter)
    outputs = []
    for used in (None, drafter):
        prompt = tiny.prompts(1)[0]
        state = new_state(target, used, 1, 100)
        request = Occupant(prompt, tiny.chooser(prompt), GenerationStats())
        list(prefill(target, used, state, 0, request))
        tokens = request.tokens[-1:]
        while len(tokens) < 40:
            tokens += step(target, used, state, [0])[0].tokens
        outputs.append(tokens[:40])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (
            _medusa,
            {"medusa_num_heads": 4},
            r"medusa_lm_head\.pt: heads\.3\.0\.linear\.bias.* are missing; .*config\.json",
        ),
        (_medusa, {"medusa_num_layers": 0}, r"medusa_num_layers = 0, expected a number ≥ 1"),
        (_medusa, {"medusa_num_heads": 10**9}, r"medusa_num_heads = 10+, expected a number up to 128"),
        (_medusa, {"medusa_num_heads": "3"}, r"medusa_num_heads = '3', expected a number"),
        (_hydra, {"grounded_heads": "false"}, r"grounded_heads = 'false', expected true or false"),
        (_hydra, {"hydra_head_arch": "prefix-mlp"}, r"hydra_head_arch = 'prefix-mlp'; only 'mlp' is read"),
        (_hydra, {"hidden_state_offset": 1}, r"hidden_state_offset = 1; only 0"),
    ],
)
def test_refused(make: Any, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        open_head(make(tmp_path, **changes), TARGET)


def test_other_heads(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected \(50, 48\); .*use the heads of this target"):
        open_head(_medusa(tmp_path / "a"), TargetShape(50, H, 7, 256))
    twice = medusa() | {"heads.0.0.linear.bias": torch.zeros(H)}
    folder = _folder(tmp_path / "b", "medusa_lm_head.pt", twice, medusa_num_heads=HEADS, medusa_num_layers=1)
    with pytest.raises(ValueError, match=r"two tensors have one meaning.*fetch"):
        open_head(folder, TARGET)
    bad = medusa() | {"0.0.linear.bias": torch.full((H,), torch.nan)}
    folder = _folder(tmp_path / "c", "medusa_lm_head.pt", bad, medusa_num_heads=HEADS, medusa_num_layers=1)
    with pytest.raises(ValueError, match=r"heads\.0\.0\.linear\.bias holds NaN"):
        open_head(folder, TARGET)
