"""Who is accused: simulated heads, and a tiny head against the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from aquiline.bench.measure import Case, measure
from aquiline.bench.methods import Bed, Method
from aquiline.bench.recorder import Recorder
from aquiline.check.card import Promise, promises
from aquiline.check.diagnosis import ERROR, LEAST, _compare
from aquiline.check.findings import acceptance_findings
from aquiline.check.forced import Answer, Forced, capture, forced_chains
from aquiline.check.intervals import Rate
from aquiline.check.readings import Reading, as_stored, features_of, usual_mistakes
from aquiline.check.report import Steps
from aquiline.check.run import engine_chains
from aquiline.check.template import behind_prompts
from aquiline.checkpoints.eagle.stored import StoredHead, stored_from_head
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.trees import Chain
from tests import tiny

DEPTH = 3


def simulated(generator: np.random.Generator, gain: float = 0.0) -> tuple[list[Forced], list[Forced]]:
    """Chains of 20 answers under two readings whose acceptance differs by `gain`."""
    pair: tuple[list[Forced], list[Forced]] = ([], [])
    for own in generator.beta(4, 4, size=20):
        for side, alpha in zip(pair, (own, min(own + gain, 1.0)), strict=True):
            accepted = (generator.random((3, 30)) < alpha).cumprod(0).sum(0)
            overlap = float(generator.normal(90 * alpha, 4))
            side.append(Forced(np.zeros((3, 30), dtype=np.int64), accepted, accepted + 1, overlap))
    return pair


def test_a_good_head_is_not_accused_and_a_better_reading_is_named() -> None:
    generator = np.random.default_rng(1)
    reading = as_stored(stored("eagle3"))
    accused = named = 0
    for _ in range(200):
        usual, found = simulated(generator)
        accused += _compare(reading, found, usual, 2).clear
        usual, found = simulated(generator, 0.15)
        named += _compare(reading, found, usual, 40).clear
    # At most ERROR of 200 are expected; 8 or more have a probability below 0.001.
    assert accused < 8 and ERROR == 0.01
    assert named > 190


def stored(kind: str, **changes: object) -> StoredHead:
    return stored_from_head(tiny.head(kind, **changes), torch.float64)


def answers_of(reading: Reading, *others: Reading) -> list[Answer]:
    """Greedy answers of the tiny Llama with the features that the readings need."""
    from tests.drafters.loop import run

    prompts = tiny.prompts(3, seed=3)
    target = tiny.decoder("llama")
    outputs, _ = run(target, None, prompts, [24] * 3)
    names = features_of([reading, *others])
    return [capture(target, p + o, len(p), names) for p, o in zip(prompts, outputs, strict=True)]


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
@pytest.mark.parametrize("flags", [{}, {"norm_output": True, "norm_before_residual": True}])
def test_training_and_the_engine_draft_the_same_chains(kind: str, flags: dict[str, bool]) -> None:
    """Every step of the engine, against the teacher-forced chain below the same token."""
    if kind == "eagle" and flags:
        pytest.skip("EAGLE-1 has no such switches")
    reading, target = as_stored(stored(kind, **flags)), tiny.decoder("llama")
    answers = answers_of(reading)
    bed = Bed(target, None, (), None, "tiny", {})
    drafter = Recorder(EagleDrafter(tiny.head(kind, **flags), target, Chain(DEPTH)))
    compared = 0
    for answer, forced in zip(answers, forced_chains(reading, answers, target, DEPTH), strict=True):
        drafter.steps.clear()
        text = answer.tokens.tolist()
        case = Case("t", ("1",), 0, (tuple(text[: answer.prompt_length]),), 0.0, 24)
        assert measure(bed, Method("engine", drafter, ""), case).outputs[0] == text[answer.prompt_length :]
        mine, offered, theirs, judged = engine_chains(drafter, text, answer.prompt_length, 24, forced)
        assert mine.tolist() == theirs.tolist() and offered.tolist() == judged.tolist()
        start = 0
        for step, right in zip(drafter.steps, mine.tolist(), strict=False):
            # Beyond the first wrong draft, the engine reads its own token, training the text's.
            chain = step.tree.tokens[0, 1 : int(step.tree.num_nodes[0])].tolist()[: right + 1]
            assert chain == forced.drafts[: len(chain), start].tolist()
            start += len(step.emitted)
            compared += 1
    assert compared > 20


def test_readings_differ_from_the_files_and_from_each_other() -> None:
    base = as_stored(stored("eagle3"))
    target = tiny.decoder("llama")
    found = usual_mistakes(base.stored, target, Path("none"), None, 10000.0)
    names = [reading.name for reading in found]
    assert len(set(names)) == len(names) and all(reading.remedy for reading in found)
    assert [r.features for r in found if r.name.startswith("features one layer")] == [(3, 4, 5), (1, 2, 3)]
    assert not any(name == "rotary base 10000" for name in names), "that is how it is read"
    ropes = [r.name for r in usual_mistakes(base.stored, target, Path("none"), None, 500.0) if "rotary" in r.name]
    assert ropes == ["rotary base 500"], "the target's base, if the files say another"
    answers = answers_of(base, *found)
    usual = forced_chains(base, answers, target, 2)
    for reading in found:
        other = forced_chains(reading, answers, target, 2)
        same = all(np.array_equal(a.drafts, b.drafts) for a, b in zip(usual, other, strict=True))
        assert not same or reading.label, reading.name


def test_the_embedding_and_the_features_before_the_norm_are_tried() -> None:
    table = torch.randn(tiny.VOCAB, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = tiny.decoder("llama")
    own = replace(stored("eagle"), embedding=table)
    found = {r.name: r for r in usual_mistakes(own, target, Path("none"), None, None)}
    assert found["the target's embedding"].stored.embedding is None
    assert found["features before the final norm"].features == (7,)
    assert not any("d2t" in name for name in found), "an EAGLE-1 head has no map"


def test_disagreement_useless_heads_and_broken_promises_fail() -> None:
    good = [Rate(0.5, 0.45, 0.55, 900)]
    even, uneven = Steps(400, 3, 2, 1.0), Steps(400, 60, 5, 1e-9)
    card = [Promise("held out", (0.6, 0.6))]
    assert list(acceptance_findings(good, even, card)) == []
    [found] = acceptance_findings(good, uneven, card)
    assert found.failed and "fewer drafts in 60 and more in 5" in found.text
    [found] = acceptance_findings([Rate(0.05, 0.03, 0.08, 900)], even, [])
    assert found.failed and "surely below 0.1" in found.text
    [found] = acceptance_findings([Rate(0.25, 0.2, 0.28, 900)], even, card)
    assert found.failed and "0.600" in found.text


def test_cards_are_read(tmp_path: Path) -> None:
    assert promises(tmp_path) == []
    (tmp_path / "README.md").write_text(
        "# A head\n\n| data | positions | 0-α | 1-α | τ |\n|---|---|---|---|---|\n"
        "| chats | 9,027 | 0.658 | 0.698 | 2.9 |\n| no shares | 1 | 1.658 | 1.698 | 2.9 |\n"
        "\n| stage | 0-α |\n|---|---|\n| first | 0.4 |\n\n0-α of 0.9 in a text\n"
    )
    assert promises(tmp_path) == [Promise("chats", (0.658, 0.698))]


def test_a_template_is_judged_with_enough_answers_of_an_eagle3_head() -> None:
    target = tiny.decoder("llama")
    for kind, count, judged in (("eagle3", LEAST, True), ("eagle3", LEAST - 1, False), ("eagle", LEAST, False)):
        base = as_stored(stored(kind))
        said = (answers_of(base) * 4)[:LEAST]
        prompts = {number: [1, 2, 3] for number in range(count)}
        found = behind_prompts(prompts, base, said, forced_chains(base, said, target, 2), target)
        assert (found.gain is not None) == judged and (judged or not found.clear)
