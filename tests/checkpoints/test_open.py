"""The one door: every kind of head is told apart, explained, and refused where it does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aquiline.checkpoints import open as door
from aquiline.checkpoints.eagle.reading import HeadChoices
from aquiline.checkpoints.eagle.safeailab import write_head
from aquiline.checkpoints.export.layouts import export_head
from aquiline.checkpoints.open import open_head, read_head, shipped_for, trained_for
from aquiline.checkpoints.parallel import build_parallel_network, write_parallel_heads
from aquiline.drafters.parallel import ParallelHeads
from aquiline.drafters.parallel_network import ParallelConfig
from aquiline.targets.target import TargetShape
from tests import tiny
from tests.checkpoints import head_fixtures as fixtures
from tests.checkpoints.head_fixtures import TARGET, VD, H, V
from tests.command_line import call, write_target


def test_without_a_target_the_layers_stay_open(tmp_path: Path) -> None:
    report = open_head(fixtures.write(tmp_path, fixtures.modelopt_config(), fixtures.eagle3("layers.0"))).report
    assert report.config.features == (2, 5, 7) and report.checked_against is None
    config = fixtures.llama_config(draft_vocab_size=VD)
    report = open_head(fixtures.write(tmp_path / "b", config, fixtures.eagle3())).report
    assert report.config.features == ("low", "middle", "high")
    assert "give a target" in str(report)


def test_every_resolution_is_a_line(tmp_path: Path) -> None:
    folder = fixtures.write(tmp_path, fixtures.modelopt_config(), fixtures.eagle3("layers.0"))
    text = str(open_head(folder, TARGET).report)
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
        "γ = 1.3, not measured",
        "fits a target with hidden 16, 40 tokens, 10 layers",
    ):
        assert part in text


def test_too_few_layers_for_the_default(tmp_path: Path) -> None:
    folder = fixtures.write(tmp_path, fixtures.llama_config(draft_vocab_size=VD), fixtures.eagle3())
    with pytest.raises(ValueError, match="at least 7 layers"):
        open_head(folder, fixtures.TargetShape(fixtures.V, fixtures.H, 4, 64))


def _parallel(kind: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        config = ParallelConfig(kind, 2, H, V, V)
        write_parallel_heads(folder, ParallelHeads(build_parallel_network(config), None, "f" * 64), torch.float32)
        return folder

    return make


def _own_eagle3(folder: Path) -> Path:
    write_head(folder, tiny.head("eagle3", dtype=torch.float32))
    return folder


def _small_model(folder: Path) -> Path:
    return write_target(folder, vocab_size=V)


def _published(name: str, tensors: dict[str, torch.Tensor], **config: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        torch.save(tensors, folder / name)
        return folder

    return make


MEDUSA = {"0.0.linear.weight": torch.zeros(H, H), "0.0.linear.bias": torch.zeros(H), "0.1.weight": torch.zeros(V, H)}
HYDRA = {
    "hydra_mlp.0.0.linear.weight": torch.zeros(H, H),
    "hydra_mlp.0.0.linear.bias": torch.zeros(H),
    "hydra_lm_head.0.weight": torch.zeros(V, H),
    "hydra_lm_head.0.bias": torch.zeros(V),
}
GROUNDED = HYDRA | {
    "hydra_mlp.0.0.linear.weight": torch.zeros(H, 2 * H),
    "hydra_mlp.0.0.res_connection.weight": torch.zeros(H, 2 * H),
    "hydra_mlp.0.0.res_connection.bias": torch.zeros(H),
}
ONE = {"hydra_num_heads": 1, "hydra_num_layers": 1}
KINDS: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "EAGLE-1": (
        lambda f: fixtures.write(f, fixtures.llama_config(), fixtures.eagle1()),
        "eagle",
        "EAGLE-1/2, safeailab",
    ),
    "EAGLE-3": (
        lambda f: fixtures.write(f, fixtures.modelopt_config(), fixtures.eagle3("layers.0")),
        "eagle3",
        "EAGLE-3, modelopt",
    ),
    "our EAGLE-3": (_own_eagle3, "eagle3", "EAGLE-3, safeailab"),
    "our Medusa": (_parallel("medusa"), "medusa", "Medusa, aquiline"),
    "our Hydra": (_parallel("hydra"), "hydra", "Hydra, aquiline"),
    "their Medusa": (
        _published("medusa_lm_head.pt", MEDUSA, medusa_num_heads=1, medusa_num_layers=1),
        "medusa",
        "Medusa, FasterDecoding/Medusa",
    ),
    "their Hydra": (
        _published("hydra_lm_head.pt", GROUNDED, grounded_heads=True, **ONE),
        "hydra",
        "Hydra, zankner/Hydra",
    ),
    "Hydra without tokens": (_published("hydra_lm_head.pt", HYDRA, **ONE), "medusa", "Medusa, zankner/Hydra"),
    "small model": (_small_model, "small-model", "small model, transformers"),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_told_apart_and_inspected(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, kind, title = KINDS[name]
    folder = make(tmp_path / "head")
    head = open_head(folder)
    assert (head.kind, head.report.kind) == (kind, kind) and head.config == json.loads(
        (folder / "config.json").read_text()
    )
    assert (head.contents is None) == (kind == "small-model")
    text = call(capsys, "inspect", folder)
    assert text.code == 0 and f"{title} checkpoint" in text.out and "against itself only" in text.out
    record = json.loads(call(capsys, "inspect", folder, "--json").out)
    assert (record["kind"], record["path"]) == (kind, str(folder)) and record[
        "parameters"
    ] == head.report.parameters > 0


def test_an_output_folder_of_a_training_is_its_head(tmp_path: Path) -> None:
    _parallel("medusa")(tmp_path / "head")
    assert open_head(tmp_path).path == tmp_path / "head"


def test_our_own_layout_and_sglangs(tmp_path: Path) -> None:
    """Both name the architecture alike."""
    folder = _own_eagle3(tmp_path / "own")
    assert open_head(folder).report.dialect == "safeailab"
    shape = TargetShape(tiny.VOCAB, 48, 7, 256)
    export_head(folder, "sglang", tmp_path / "sglang", shape)
    assert open_head(tmp_path / "sglang", shape).report.dialect == "sglang"


@pytest.mark.parametrize("kind", ["medusa", "small-model"])
def test_a_head_of_another_kind_is_no_eagle_head(kind: str, tmp_path: Path) -> None:
    folder = (_small_model if kind == "small-model" else _parallel(kind))(tmp_path / "head")
    for use in (lambda: read_head(folder, TARGET), lambda: export_head(folder, "vllm", tmp_path / "out", TARGET)):
        with pytest.raises(ValueError, match=rf"{folder} is of kind '{kind}'; allowed: eagle, eagle3"):
            use()
    with pytest.raises(ValueError, match="leave the options out"):
        open_head(folder, TARGET, HeadChoices(layer_ids="output"))


@pytest.mark.parametrize("name", ["our Medusa", "small model"])
def test_heads_for_another_target(name: str, tmp_path: Path) -> None:
    folder = KINDS[name][0](tmp_path / "head")
    assert open_head(folder, TARGET).report.checked_against
    with pytest.raises(ValueError, match=r"40.* 60"):
        open_head(folder, replace(TARGET, vocab_size=60))


@pytest.mark.parametrize("name", ["our Medusa", "small model"])
def test_weights_outside_of_the_folder_stay_closed(name: str, tmp_path: Path) -> None:
    folder = KINDS[name][0](tmp_path / "head")
    (folder / "model.safetensors").rename(tmp_path / "outside")
    (folder / "model.safetensors").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="leaves the folder"):
        open_head(folder)


def test_what_is_no_head(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown draft head .*absent.*allowed: .*smollm2-eagle3"):
        open_head(tmp_path / "absent", TARGET)
    with pytest.raises(ValueError, match=r"head is ''; allowed: "):  # not the current folder
        open_head("")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json is not a draft head.*give its folder"):
        open_head(tmp_path / "config.json")
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has? no config\.json"):
        open_head(tmp_path)


def test_shipped_heads_are_found_by_the_fingerprint_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "SHIPPED", tmp_path)
    monkeypatch.setattr(door, "target_fingerprint", lambda folder: f"print of {folder.name}")
    for name, target in (("a-medusa", "mine"), ("b-eagle3", "mine"), ("c-eagle3", "other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"aquiline_target_fingerprint": "print of {target}"}}')
    assert shipped_for(Path("mine")) == [tmp_path / "b-eagle3", tmp_path / "a-medusa"]
    assert shipped_for(Path("new")) == shipped_for(None) == []
    medusa = open_head(_parallel("medusa")(tmp_path / "d"))
    assert trained_for(medusa, Path("mine")) is False
    assert trained_for(open_head(_own_eagle3(tmp_path / "e")), Path("mine")) is None


@pytest.mark.parametrize("to", [torch.int32, torch.float32])
def test_parallel_heads_are_judged_without_a_target_too(to: torch.dtype, tmp_path: Path) -> None:
    folder = _parallel("medusa")(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    first = next(iter(tensors))
    tensors[first] = torch.full_like(tensors[first], torch.nan).to(to)
    save_file(tensors, folder / "model.safetensors")
    said = "dtype torch.int32" if to == torch.int32 else "holds NaN"
    with pytest.raises(ValueError, match=f"{folder}: {first} .*{said}|{said}"):
        open_head(folder)
