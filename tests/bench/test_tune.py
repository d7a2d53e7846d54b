"""Tuning: predictions from known acceptance, the choice, and the file that load() takes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aquiline.bench import tune as tuning
from aquiline.bench import tune_sources
from aquiline.bench.measure import Case, measure
from aquiline.bench.methods import Bed, Method
from aquiline.bench.profile import Costs, candidates, make_profile, predict
from aquiline.bench.recorder import Recorder, Step
from aquiline.bench.records import Record
from aquiline.bench.runner import encode_turns
from aquiline.bench.settings import TuneSettings
from aquiline.bench.tasks import load_questions
from aquiline.bench.tune import LARGEST, tune
from aquiline.bench.tune_sources import Source, find_sources
from aquiline.checkpoints.eagle.safeailab import write_head
from aquiline.checkpoints.parallel import write_parallel_heads
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.parallel import ParallelDrafter
from aquiline.drafters.trees import Chain, DynamicTree, TreePolicy
from aquiline.drafters.tuned import read_tuned
from aquiline.engine.drafting import make_drafter
from aquiline.targets.cost import cost_curve, seconds_at
from aquiline.tree import from_lists
from tests import tiny
from tests.bench.scripted import ScriptedDrafter, path_bed
from tests.drafters.overfit import heads
from tests.knowing_drafter import known_from

CURVE = [{"tokens": 1, "seconds": 1.0}, {"tokens": 11, "seconds": 2.0}]
COSTS = Costs(CURVE, narrow=0.1, wide=0.3, width=3, rest=0.05)


def step(chains: Sequence[tuple[int, ...]], scores: Sequence[float], emitted: list[int]) -> Step:
    """A step whose tree's nodes are given as (parent, token) pairs."""
    parents, tokens = [-1, *(c[0] for c in chains)], [0, *(c[1] for c in chains)]
    tree = replace(from_lists([(tokens, parents)]), log_probs=torch.tensor([[0.0, *scores]]))
    return Step(tree, 0, emitted)


def test_predictions_of_a_profile_worked_out_by_hand() -> None:
    # Root with children 5, 6; 5 has child 7, 6 has child 8. The text is 6, 8, then the target's 9.
    tree = [(0, 5), (0, 6), (1, 7), (2, 8)]
    one = step(tree, [-0.5, -1.0, -0.7, -1.2], [6, 8, 9])
    two = step(tree, [-0.2, -2.0, -0.4, -2.5], [5, 3])
    profile = make_profile([one, two])
    assert profile.accepted.tolist() == [[False, True, False, True], [True, False, False, False]]
    assert profile.rank.tolist()[0] == [0, 1, 0, 1] and profile.depth.tolist()[0] == [1, 1, 2, 2]
    # A chain of 2 follows the likeliest: nothing of step one, one token of step two.
    chain = predict(profile, COSTS, Chain(2))
    assert (chain.tokens_per_step, chain.nodes) == (1.5, 2)
    assert chain.seconds_per_step == pytest.approx(1.2 + 0.1 + 0.1 + 0.05)
    # All four nodes: two of step one, one of step two; two nodes are fed on the first level.
    whole = predict(profile, COSTS, DynamicTree(5, 2, 2))
    assert (whole.tokens_per_step, whole.nodes) == (2.5, 4)
    assert whole.seconds_per_step == pytest.approx(1.4 + 0.1 + 0.2 + 0.05)
    # The three best of each step: 5, 7, 6.
    assert predict(profile, COSTS, DynamicTree(4, 2, 2)).tokens_per_step == 1 + (1 + 1) / 2
    # A floor of e^-0.6: node 5 of step one, nodes 5 and 7 of step two.
    floor = predict(profile, COSTS, Chain(2, 0.549))
    assert (floor.tokens_per_step, floor.nodes) == (1.5, 1.5)
    assert floor.tokens_per_second == pytest.approx(1.5 / floor.seconds_per_step)


def test_the_recorded_tree_is_predicted_as_measured() -> None:
    target = tiny.decoder("llama", torch.float32)
    policy = DynamicTree(12, 3, 3)
    drafter = Recorder(EagleDrafter(tiny.head("eagle3", dtype=torch.float32), target, policy))
    bed = Bed(target, None, (), None, "tiny", {})
    prompt = tuple(tiny.prompts(1)[0])
    record = measure(bed, Method("m", drafter, ""), Case("t", ("1",), 0, (prompt,), 0.0, 48))
    full = [s for s in drafter.steps if int(s.tree.num_nodes[0]) == 12]  # the budget cuts the last ones
    profile = make_profile(full)
    expected = predict(profile, COSTS, policy)
    assert expected.nodes == 11
    assert expected.tokens_per_step == pytest.approx(sum(len(s.emitted) for s in full) / len(full))
    assert record.steps >= len(full) > 10


def test_candidates_fit_into_the_recorded_tree() -> None:
    largest = DynamicTree(24, 4, 4)
    found = candidates(largest)
    assert len(set(found)) == len(found) > 100
    for policy in found:
        assert policy.depth <= 4
        if isinstance(policy, DynamicTree):
            assert policy.num_nodes <= 24 and policy.top_k <= 4


def test_the_cost_curve_is_read_between_and_beyond_its_points() -> None:
    assert [seconds_at(CURVE, n) for n in (0.5, 1, 6, 11, 21)] == pytest.approx([1, 1, 1.5, 2, 3])
    curve = cost_curve(tiny.decoder("llama", torch.float32), (1, 4), context=16, repeats=3)
    assert [point["tokens"] for point in curve] == [1, 4]
    assert all(0 < point["low"] <= point["seconds"] <= point["high"] for point in curve)


@pytest.fixture(name="setting")
def _setting(tmp_path: Path) -> tuple[Bed, TuneSettings, list[list[int]]]:
    """A bed without stops, prompts, and their whole texts."""
    bed = replace(path_bed(), end_ids=())
    file = tmp_path / "mine.txt"
    file.write_text("".join(f"prompt number {i}\n" for i in range(6)))
    settings = TuneSettings(prompts=(str(file),), max_new_tokens=30, output=str(tmp_path / "tuned.json"))
    plain = Method("plain", None, "")
    texts = []
    for question in load_questions(settings.prompts):
        prompt = tuple(encode_turns(bed, question.turns[:1], ()))
        case = Case(question.task, (question.id,), 0, (prompt,), settings.temperature, 60, settings.seed)
        texts.append([*prompt, *measure(bed, plain, case).outputs[0]])
    assert len(texts) == 6
    return bed, settings, texts


def timed(seconds_per_step: float, seconds_per_node: float) -> Any:
    """`measure` with a clock that depends on the steps alone."""

    def stand_in(bed: Bed, method: Method, case: Case) -> Record:
        record = measure(bed, method, case)
        seconds = record.steps * seconds_per_step + record.nodes * seconds_per_node
        return replace(record, seconds=seconds + 1e-3, phases={"target": seconds})

    return stand_in


def source(texts: list[list[int]], script: list[int]) -> Source:
    def make(policy: TreePolicy) -> Any:
        return ScriptedDrafter(known_from(texts), script, policy.depth, 0.9)

    return Source("prompt-lookup", "scripted", make, Chain(4), [Chain(d) for d in range(1, 5)])


def test_the_tree_that_pays_wins(
    setting: tuple[Bed, TuneSettings, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bed, settings, texts = setting
    monkeypatch.setattr(tuning, "measure", timed(1.0, 0.2))
    monkeypatch.setattr(tuning, "cost_curve", lambda target: [{"tokens": n, "seconds": 0.8 + 0.2 * n} for n in (1, 9)])
    report = tune(settings, bed, [source(texts, [2])])
    # Two drafts are right in every step: 3 tokens for 1.4, against 1 for 1, 2 for 1.2 and 3 for 1.6.
    assert report.choice.tree == Chain(2)
    assert read_tuned(report.path) == report.choice
    evidence = json.loads(report.path.read_text())["evidence"]
    assert evidence["prompts"] == {"proposing": 3, "confirming": 3}
    labels = [row["label"] for row in evidence["contestants"]]
    assert labels[0] == "plain" and len(labels) == 4
    best = next(row for row in report.rows if row["tree"] == "chain:2")
    assert best["predicted_tau"] == pytest.approx(3, abs=0.15) and best["tau"] == pytest.approx(3, abs=0.15)
    assert "→ | scripted chain:2 |" in report.text


def test_plain_decoding_wins_where_drafts_are_never_right(
    setting: tuple[Bed, TuneSettings, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bed, settings, texts = setting
    monkeypatch.setattr(tuning, "measure", timed(1.0, 0.2))
    report = tune(settings, bed, [source(texts, [0])])
    assert report.choice.tree is None and report.choice.method == "plain"
    assert make_drafter("auto", report.path, bed.target, None).drafter is None


def test_prompt_lookup_is_tuned_where_no_head_ships(setting: tuple[Bed, TuneSettings, list[list[int]]]) -> None:
    bed, settings, _ = setting
    report = tune(settings, bed)
    assert {row["draft"] for row in report.rows} == {None, "prompt-lookup"}
    assert report.choice.draft in (None, "prompt-lookup")


@pytest.fixture(name="shipped")
def _shipped(tmp_path: Path) -> Bed:
    """A tiny target with an EAGLE-3 head and Medusa heads."""
    write_head(tmp_path / "eagle3", tiny.head("eagle3"), torch.float64)
    write_parallel_heads(tmp_path / "medusa", heads("medusa"), torch.float64)
    kinds = {kind: str(tmp_path / kind) for kind in ("eagle3", "medusa")}
    return Bed(tiny.decoder("llama"), None, (), None, "tiny", kinds)


def test_all_heads_that_ship_are_contestants_beside_the_default(
    shipped: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_sources, "shipped_for", lambda target: [tmp_path / "eagle3", tmp_path / "medusa"])
    sources, others = find_sources(shipped, "auto", LARGEST)
    assert [source.draft for source in sources] == [str(tmp_path / "eagle3"), "prompt-lookup"]
    assert [(other.draft, other.policy) for other in others] == [("auto", None), (str(tmp_path / "medusa"), None)]
    medusa = others[1].drafter
    assert isinstance(medusa, ParallelDrafter) and others[1].label == "medusa (medusa)"


def test_a_head_with_one_tree_is_a_contestant_as_it_is(
    shipped: Bed, setting: tuple[Bed, TuneSettings, list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed, settings, _ = setting
    folder = str(tmp_path / "medusa")
    sources, others = find_sources(shipped, folder, LARGEST)
    assert [source.draft for source in sources] == ["prompt-lookup"] and [other.draft for other in others] == [folder]
    monkeypatch.setattr(tuning, "find_sources", lambda *_: ([], [replace(others[0], drafter=None)]))

    def stand_in(bed: Bed, method: Method, case: Case) -> Record:
        return replace(measure(bed, method, case), seconds=1e9 if method.label == "plain" else 1.0)

    monkeypatch.setattr(tuning, "measure", stand_in)
    report = tune(settings, bed)
    assert (report.choice.draft, report.choice.tree) == (folder, None)
    assert isinstance(make_drafter("auto", report.path, shipped.target, None).drafter, ParallelDrafter)


def test_too_few_prompts(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("only one\n")
    with pytest.raises(ValueError, match=r"at least 2 prompts.*got 1"):
        tune(TuneSettings(prompts=(str(tmp_path / "one.txt"),)), path_bed())
    with pytest.raises(ValueError, match="num_prompts is 1"):
        TuneSettings(num_prompts=1)
