"""aquiline check --lossless: plain decoding's outputs pass, one wrong token fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aquiline.bench.agreement import complaint, find_divergences
from aquiline.bench.measure import Case, measure
from aquiline.bench.methods import Bed, Method
from aquiline.bench.records import Record
from aquiline.check import lossless
from aquiline.check.lossless import check_lossless, lossless_text
from aquiline.check.settings import CheckSettings
from aquiline.race import noise
from tests.bench.scripted import path_bed
from tests.command_line import Result, call, write_eagle, write_target

SMALL = ("--num-prompts", 12, "--max-new-tokens", 10, "--dtype", "float64", "--quiet")


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command beside a target, a head for it, and prompts."""
    monkeypatch.chdir(tmp_path)
    write_eagle(tmp_path / "head", "eagle3", write_target(tmp_path / "target", eos_token_id=None))
    (tmp_path / "prompts.txt").write_text("\n".join(f"Question {n}: why {'x' * n}?" for n in range(5)))

    def run(*words: object) -> Result:
        return call(capsys, "check", "--target", "target", *words)

    return run


@pytest.mark.oracle
def test_outputs_with_drafts_are_plain_decodings(check: Any) -> None:
    words = ("prompts.txt", "--lossless", "--num-prompts", 5, "--max-new-tokens", 12, "--dtype", "float64", "--quiet")
    result = check("head", *words, "--json")
    found = json.loads(result.out)
    assert result.code == 0 and found["passed"] and found["divergences"] == []
    conditions = {(row["temperature"], row["batch"]) for row in found["rows"]}
    assert conditions == {(0.0, 1), (0.0, 4), (0.8, 1), (0.8, 4)} and len(found["rows"]) == 8
    assert all(row["equal"] == row["outputs"] == 5 for row in found["rows"])
    assert "lossless: all 40 outputs" in check("head", *words).out


def test_a_wrong_token_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(bed: Bed, method: Method, case: Case) -> Record:
        record = measure(bed, method, case)
        if method.drafter is None or case.temperature == 0:
            return record
        return replace(record, outputs=[[*output[:-1], (output[-1] + 1) % 250] for output in record.outputs])

    (tmp_path / "prompts.txt").write_text("One\nTwo\n")
    monkeypatch.setattr(lossless, "measure", wrong)
    settings = CheckSettings(head="prompt-lookup", prompts=(str(tmp_path / "prompts.txt"),), max_new_tokens=8)
    report = check_lossless(settings, path_bed())
    assert not report.passed and [row.errors for row in report.rows] == [0, 0, 2, 2]
    assert "NOT lossless: 4 outputs" in lossless_text(report)


def test_seeded_divergences_are_judged_by_the_race() -> None:
    bed = path_bed()
    case = Case("t", ("1",), 0, ((5, 6, 7),), 0.8, 12, seed=3)
    plain = measure(bed, Method("plain", None, ""), case)
    [output] = plain.outputs
    other = 41 if output[4] != 41 else 42
    wrong = replace(plain, method="m", outputs=[[*output[:4], other, *output[5:]]])
    [found] = find_divergences(bed.target, [wrong], plain, case.prompts, seed=3)
    from aquiline.bench.agreement import _logits_at

    logits = _logits_at(bed.target, case.prompts[0], output, {4})[4][0]
    scores = logits / 0.8 - noise(3, 4, len(logits)).log()
    assert int(scores.argmax()) == output[4], "the race that the output was drawn by"
    assert found["gap"] == pytest.approx(float(scores[output[4]] - scores[other]), rel=1e-5)
    assert not found["near_tie"] and complaint([found], bed.target.dtype, False) is not None
