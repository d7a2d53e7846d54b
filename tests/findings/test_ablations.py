"""The ablations' machinery on random heads, and its arithmetic on made-up numbers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aquiline.bench.methods import Bed, parse_method
from aquiline.bench.recorder import Node
from aquiline.checkpoints.eagle.safeailab import write_head
from aquiline.checkpoints.open import read_head
from aquiline.drafters.eagle_network import DraftHead, EagleNetwork
from aquiline.drafters.trees import EAGLE1_PATHS, DynamicTree, parse_tree
from aquiline.targets.loading import load_target
from aquiline.training.features import compute_features
from aquiline.training.learners.eagle import EagleLearner, build_micro_batch
from aquiline.training.learners.learner import Example
from aquiline.training.settings import TrainSettings
from benchmarks.findings.__main__ import main, trainer
from benchmarks.findings.ablations import AblationSettings, run_ablations
from benchmarks.findings.comparisons import COMPARISONS, EQUAL_DYNAMIC, HEADS, HeadSpec, compare
from benchmarks.findings.inputs import VARIANTS
from benchmarks.findings.positions import explained, position_profile
from tests import tiny
from tests.tiny_tokenizers import byte_level
from tests.training.tiny_training import tiny_settings, write_set, write_target

VALIDATED = {"alpha": [0.5, 0.25], "tau_chain5": 1.625, "tau_tree": 1.75, "calibration_error": 0.1}


class Trainer:
    """Writes random heads, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Mapping[str, Any]]] = []

    def __call__(self, spec: HeadSpec, fields: Mapping[str, Any], output: Path) -> None:
        self.asked.append((output.name, dict(fields)))
        head = tiny.head(fields["kind"], seed=fields["seed"], dtype=torch.float32)
        write_head(output / "head", head, torch.float32)
        lines = [{"step": 1, "loss": 2.0}, {"validation": "folder/set", **VALIDATED}]
        (output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module", name="bed")
def _bed() -> Bed:
    return Bed(tiny.decoder("llama", torch.float32), byte_level(), (), None, "tiny", {})


def settings(folder: Path, **changes: Any) -> AblationSettings:
    (folder / "mine.txt").write_text("abc abc\nbad cab\n")
    given: dict[str, Any] = {
        "data": ("set",),
        "positions": 5,
        "seeds": (3, 4),
        "training": (("lr", 0.5),),
        "features": "kept",
        "questions": (str(folder / "mine.txt"),),
        "tasks": (),
        "max_new_tokens": 12,
        "batch_sizes": (1, 2),
        "heads": ("eagle", "eagle3"),
        "output": str(folder / "out"),
    }
    return AblationSettings(**(given | changes))


def test_heads_are_trained_once_measured_and_compared(tmp_path: Path, bed: Bed) -> None:
    trainer = Trainer()
    report = run_ablations(settings(tmp_path), trainer, bed, quiet=True)
    results = json.loads((tmp_path / "out" / "ablations.json").read_text())
    assert [name for name, _ in trainer.asked] == ["eagle-seed3", "eagle3-seed3", "eagle-seed4", "eagle3-seed4"]
    assert trainer.asked[0][1] == {
        "kind": "eagle", "data": ("set",), "total_positions": 5, "seed": 3, "lr": 0.5,
        "batch_positions": 2048, "warmup_positions": 0, "decay_share": 0.7, "validate_positions": 50,
        "ttt_steps": 1, "feature_weight": 1.0, "token_weight": 0.1, "feature_noise": 0.1, "muon_lr": 0.0,
        "features": "kept", "keep_layers": (2, 3, 4),
    }  # fmt: skip
    TrainSettings(target="t", output="o", **trainer.asked[0][1])
    assert results["runs"]["eagle"][0]["validation"]["set"]["alpha"] == [0.5, 0.25]
    assert {c["name"] for c in results["comparisons"]} == {
        "tree-chain", "dynamic-static", "eagle3-eagle2", "eagle3-eagle1-chain",
    }  # fmt: skip
    for finding in results["comparisons"]:
        for side in (finding["better"], finding["worse"]):
            cells = [
                next(
                    c for c in run["cells"] if c["method"] == side["method"] and c["batch"] == 1 and c["task"] == "all"
                )
                for run in results["runs"][side["head"]]
            ]
            assert side["tau"] == [cell["tau"]["value"] for cell in cells] and len(side["tau"]) == 2
    assert {c["batch"] for run in results["runs"]["eagle3"][:1] for c in run["cells"]} == {1, 2}
    assert results["positions"]["positions"]["0"][0] > 10
    assert "| eagle | set | 0.500 | 0.250 | 0.500–0.500 |" in report.markdown
    assert report.markdown == (tmp_path / "out" / "ablations.md").read_text()
    again = Trainer()
    second = run_ablations(settings(tmp_path), again, bed, quiet=True)
    assert again.asked == []
    assert second.results["comparisons"] == json.loads(json.dumps(report.results["comparisons"]))


def test_without_questions_the_held_out_conversations_decide(tmp_path: Path, bed: Bed) -> None:
    results = run_ablations(settings(tmp_path, per_task=0), Trainer(), bed, quiet=True).results
    found = {c["name"]: c for c in results["comparisons"]}
    assert found.keys() == {"tree-chain", "eagle3-eagle1-chain"}  # no dynamic trees without the engine
    assert found["tree-chain"]["better"]["tau"] == [1.75, 1.75] and found["tree-chain"]["separated"]
    assert found["eagle3-eagle1-chain"]["worse"]["alpha"] == [[0.5, 0.25]] * 2
    assert results["positions"] is None
    with pytest.raises(ValueError, match="per_task is -1"):
        settings(tmp_path, per_task=-1)


def test_given_heads_are_compared_untrained(tmp_path: Path, bed: Bed) -> None:
    trainer = Trainer()
    heads = {}
    for kind in ("eagle", "eagle3"):
        write_head(tmp_path / kind, tiny.head(kind, seed=1, dtype=torch.float32), torch.float32)
        heads[kind] = str(tmp_path / kind)
    report = run_ablations(settings(tmp_path, data=(), heads=(), given=tuple(heads.items())), trainer, bed, quiet=True)
    assert not trainer.asked and not (tmp_path / "out" / "heads").exists()
    assert {name: len(runs) for name, runs in report.results["runs"].items()} == {"eagle": 1, "eagle3": 1}
    assert report.results["heads"] == {name: {"given": folder} for name, folder in heads.items()}
    found = {c["name"]: c for c in report.results["comparisons"]}
    assert found.keys() == {"tree-chain", "dynamic-static", "eagle3-eagle2", "eagle3-eagle1-chain"}
    shape = found["dynamic-static"]
    measured = {c["method"]: c for c in report.results["runs"]["eagle"][0]["cells"]}
    for side in (shape["better"], shape["worse"]):
        assert side["tau"] == [measured[side["method"]]["tau"]["value"]]
    assert measured["eagle:static"]["nodes_per_step"] > 5 >= measured["eagle:chain"]["nodes_per_step"]
    assert f"heads as given: eagle = {heads['eagle']}, eagle3" in report.markdown
    with pytest.raises(ValueError, match=r"given.*leave"):
        settings(tmp_path, given=(("eagle", "x"),))
    with pytest.raises(ValueError, match="per_task is 0"):
        settings(tmp_path, data=(), heads=(), given=(("eagle", "x"),), per_task=0)
    with pytest.raises(ValueError, match="unknown draft head 'nowhere'"):
        run_ablations(settings(tmp_path, data=(), heads=(), given=(("eagle", "nowhere"),)), trainer, bed, quiet=True)


def test_a_comparison_worked_out_by_hand() -> None:
    def run(method: str, tau: float) -> dict[str, Any]:
        cell = {"method": method, "batch": 1, "tau": {"value": tau}, "speedup_vs_plain": {"median": tau / 2}}
        return {"cells": [cell, cell | {"batch": 4, "tau": {"value": 99.0}}]}

    chain = next(c for c in COMPARISONS if c.name == "fused-features")
    method = chain.better[1]
    runs = {
        "eagle3": [run(method, 2.0), run(method, 2.4)],
        "eagle3-top-feature": [run(method, 1.5), run(method, 2.1)],
    }
    found = compare(chain, runs)
    assert found["better"]["tau"] == [2.0, 2.4] and found["worse"]["speedup"] == [0.75, 1.05]
    assert found["holds"] and not found["separated"]
    assert compare(chain, runs | {"eagle3-top-feature": [run(method, 1.5)]})["separated"]
    assert not compare(chain, runs | {"eagle3-top-feature": [run(method, 2.3)]})["holds"]


def test_every_comparison_has_its_heads_and_methods() -> None:
    methods = {spec.name: spec.methods for spec in HEADS}
    for comparison in COMPARISONS:
        for head, method in (comparison.better, comparison.worse):
            assert method in methods[head]
            parse_method(method)
    equal = parse_tree(EQUAL_DYNAMIC)
    assert isinstance(equal, DynamicTree) and equal.num_nodes == len(EAGLE1_PATHS) + 1
    top = next(spec for spec in HEADS if spec.name == "eagle3-top-feature")
    assert top.training(30)["layers"] == (30,)
    for spec in HEADS:
        TrainSettings(target="t", data=("d",), output="o", **spec.training(30))


def test_what_position_and_confidence_explain() -> None:
    assert explained([("a", True), ("a", True), ("b", False), ("b", False)]) == 1
    assert explained([("a", True), ("a", False), ("b", True), ("b", False)]) == 0
    assert explained([("a", True)]) == 0
    # At one place, acceptance follows the confidence alone.
    nodes = [Node((0,), 0.9, True, True)] * 20 + [Node((0,), 0.1, True, False)] * 20
    profile = position_profile([*nodes, Node((1,), None, True, True)])
    assert profile["positions"] == {"0": [40, 20]}
    assert profile["within"] == {"0": [0.0, 1.0]}
    assert profile["explained"] == {"position": 0, "confidence": 1, "both": 1}


def test_bad_settings(tmp_path: Path, bed: Bed) -> None:
    with pytest.raises(ValueError, match=r"'eagle9'.*eagle-unshifted"):
        settings(tmp_path, heads=("eagle9",))
    with pytest.raises(ValueError, match=r"seeds.*at least one"):
        settings(tmp_path, seeds=())
    with pytest.raises(ValueError, match="aquiline prepare"):
        settings(tmp_path, data=())
    trainer = Trainer()
    for change, reason in (
        ({"tasks": ("chess",)}, "unknown task 'chess'"),
        ({"batch_sizes": (0,)}, r"batch_sizes is \(0,\)"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ):
        with pytest.raises(ValueError, match=reason):
            run_ablations(settings(tmp_path, **change), trainer, bed, quiet=True)
    assert not trainer.asked
    with pytest.raises(ValueError, match="left no head"):
        run_ablations(settings(tmp_path, heads=("eagle",)), lambda spec, fields, output: None, bed, quiet=True)


def test_ablated_inputs_are_measured_teacher_forced_beside_engine_runs(tmp_path: Path, bed: Bed) -> None:
    heads = ("eagle", "eagle-token", "eagle-feature")
    results = run_ablations(settings(tmp_path, heads=heads, seeds=(3,)), Trainer(), bed, quiet=True).results
    assert [c["task"] for c in results["runs"]["eagle-token"][0]["cells"]] == ["held-out"]
    found = {c["name"]: c for c in results["comparisons"]}
    assert found["feature-token"]["measured"] == "held-out" and found["tree-chain"]["measured"] == "engine"
    with pytest.raises(ValueError, match=r"'eagle-token'.*trained"):
        settings(tmp_path, data=(), heads=(), given=(("eagle-token", "x"),))


def test_what_a_row_reads() -> None:
    """Row t, which sees the rows before it, depends on x[t], x[t+1] and f[t] only as its variant says."""
    expected = {
        "shifted": (True, True, True), "unshifted": (True, False, True), "feature": (False, False, True),
        "token": (True, True, False),
    }  # fmt: skip
    target, config = tiny.decoder("llama"), tiny.head("eagle").config
    ids = torch.tensor(tiny.prompts(3, seed=2)[2])
    final = compute_features(target, ids, ("final",))
    row = len(ids) - 3
    for inputs, reads in expected.items():
        torch.manual_seed(0)
        network = {"shifted": EagleNetwork, **VARIANTS}[inputs](config).double()
        learner = EagleLearner(DraftHead(network), target, target.lm_head.weight, target.embed_tokens.weight)

        def stream(tokens: Tensor, final: Tensor, learner: EagleLearner = learner) -> Tensor:
            example = Example(tokens, torch.ones(len(tokens), dtype=torch.bool), final, final)
            micro = build_micro_batch([example], target.embed_tokens.weight, 1)
            with torch.no_grad():
                return learner.streams(micro)[0][0, row]

        changed = []
        for offset in (0, 1):
            other = ids.clone()
            other[row + offset] = (other[row + offset] + 1) % tiny.VOCAB
            changed.append((other, final))
        changed.append((ids, final + torch.arange(len(ids))[:, None].eq(row)))
        assert tuple(bool((stream(*c) != stream(ids, final)).any()) for c in changed) == reads, inputs


@pytest.mark.parametrize("inputs", VARIANTS)
def test_an_ablated_input_is_trained_and_measured_by_the_public_loop(tmp_path: Path, inputs: str) -> None:
    write_target(tmp_path / "target")
    write_set(tmp_path / "set", conversations=6, length=14)
    wanted = tiny_settings(tmp_path, "out", kind="eagle", feature_weight=0.5, total_positions=60)
    fields = {name: value for name, value in vars(wanted).items() if name not in ("target", "output")}
    spec = next(spec for spec in HEADS if spec.inputs == inputs)
    trainer(wanted.target)(spec, fields, tmp_path / "out")
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert records[0]["loss"] > 0 and 1 <= records[-1]["tau_chain5"] <= 6
    shape = load_target(tmp_path / "target", torch.float32).shape
    with pytest.raises(ValueError, match=f"{inputs}.*ablation"):
        read_head(tmp_path / "out" / "head", shape)


def test_the_command_says_what_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["x", "--training", "speed=1"], "speed=1"),
        (["--head", "eagle"], "NAME=FOLDER"),
        (["x", "--heads", "y"], "eagle-token"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert said in capsys.readouterr().err
