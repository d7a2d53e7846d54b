"""The watch over acceptance: it follows the engine, stays silent on steady traffic, and finds a fall."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from aquiline.engine import watch
from aquiline.engine.generate import generate_requests
from aquiline.engine.request import Engine, Request
from aquiline.engine.watch import BLOCK, Series, Watch
from aquiline.sampling import SamplingParams
from aquiline.stats import GenerationStats
from tests import tiny
from tests.knowing_drafter import KnowingDrafter, known_from

TRAFFIC = {"independent": (0.0, 0.0, 1, 1.0), "answers": (0.08, 0.09, 60, 3.0), "long sessions": (0.08, 0.09, 120, 6.0)}
"""Deviations of the acceptance between sessions and between their answers; drafts per answer, answers per session."""


def shares(generator: np.random.Generator, blocks: int, mean: float, traffic: str) -> npt.NDArray[np.float64]:
    """Accepted shares of consecutive blocks of drafts."""
    between, within, length, answers = TRAFFIC[traffic]
    drafts = blocks * BLOCK
    lengths = generator.geometric(1 / length, 2 * drafts // length + 100)
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), drafts) + 1]
    sessions = generator.normal(0, between, len(lengths))
    level = np.repeat(sessions, generator.geometric(1 / answers, len(lengths)))[: len(lengths)]
    chance = np.clip(mean + level + generator.normal(0, within, len(lengths)), 0.02, 0.98)
    chance = np.repeat(chance, lengths)[:drafts]
    found: npt.NDArray[np.float64] = (generator.random(drafts) < chance).reshape(blocks, BLOCK).mean(1)
    return found


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_fewer_than_one_false_alarm_in_a_million_drafts(traffic: str) -> None:
    generator, alarms, blocks = np.random.default_rng(0), 0, 2_000
    for _ in range(10):
        series = Series()
        for share in shares(generator, blocks, 0.56, traffic).tolist():
            if series.compare(share):
                alarms += 1
                series.restart()
    assert alarms < 10 * blocks * BLOCK / 1e6


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_a_fall_is_found(traffic: str) -> None:
    generator, delays = np.random.default_rng(1), []
    for _ in range(40):
        series = Series()
        for share in shares(generator, 60, 0.56, traffic).tolist():
            if series.compare(share):
                series.restart()
        after = shares(generator, 100, 0.35, traffic).tolist()
        delays.append(next((i + 1 for i, share in enumerate(after) if series.compare(share)), 100) * BLOCK)
    found = sorted(delays)
    assert found[20] <= 5_000
    assert found[37] <= (20_000 if traffic == "long sessions" else 8_192)


def test_an_alarm_sets_a_new_standard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BLOCK", 10)
    found = Watch()
    for _ in range(100):
        found.record([("head", True), ("head", True), ("lookup", False)])
        found.record([("head", True), ("head", False)])
    for _ in range(200):
        found.record([("head", False)])
    (alarm,) = found.alarms
    assert (alarm.method, alarm.position, alarm.before) == ("head", 0, 1.0) and alarm.now < 1
    assert found.raised == {"head": 1} and "0-α of head drafts fell from 1.000" in caplog.text
    assert found.rates["head"][1] == pytest.approx(0.5) and found.rates["lookup"] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rows", [1, 3])
def test_rates_are_those_of_the_outputs(rows: int) -> None:
    plain = Engine(tiny.decoder("llama"), None, None, ())
    requests = [Request(prompt, SamplingParams(max_new_tokens=30)) for prompt in tiny.prompts(4)]
    texts = [[*output.prompt_tokens, *output.token_ids] for output in generate_requests(plain, requests)]
    drafter = KnowingDrafter(known_from(texts), tiny.VOCAB)
    engine = replace(plain, drafter=drafter, watch=Watch(), max_rows=rows)
    total = GenerationStats()
    for output in generate_requests(engine, requests):
        total.add(output.stats)
    assert len(total.acceptance_rate) > 1 and total.accepted > 10
    assert engine.watch.rates == {"head": pytest.approx(total.acceptance_rate)}
    assert not engine.watch.alarms
