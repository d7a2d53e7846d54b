"""Settings of a training: what is rejected before anything is loaded, and the defaults of each kind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from aquiline.checks import explanation, meanings
from aquiline.training.settings import KINDS, TrainSettings, changed_settings, settings_of, settings_record


def settings(kind: str = "eagle3", **changes: Any) -> TrainSettings:
    return TrainSettings(**({"target": "t", "data": ("a",), "output": "o", "kind": kind} | changes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"log_steps": 0}, "log_steps is 0; allowed: ≥ 1"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0; allowed: ≥ 1"),
        ({"workers": -1}, "workers is -1; allowed: ≥ 0"),
        ({"lr": math.nan}, "lr is nan; allowed: a finite number > 0"),
        ({"clip": 0.0}, "clip is 0.0; allowed: > 0"),
        ({"decay_share": 1.5}, "decay_share is 1.5; allowed: 0 … 1"),
        ({"save_minutes": -1.0}, "save_minutes is -1.0; allowed: ≥ 0"),
        ({"max_length": 2}, "max_length is 2; allowed: ≥ 3"),
        ({"loss": "mse"}, "loss is 'mse'; allowed: kl"),
        ({"dtype": "float16"}, "dtype is 'float16'; allowed: bfloat16, float32"),
        ({"data": ()}, "aquiline prepare"),
        ({"data_weights": (1.0, 2.0)}, r"data_weights is \(1.0, 2.0\).* 1 data sets; .*drop"),
        ({"decay_weights": (0.0,)}, r"decay_weights is \(0.0,\); allowed: .*> 0"),
        ({"limit_conversations": (1, 2)}, r"limit_conversations is \(1, 2\).* 1 data sets; .*drop"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(kind: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings(kind, **change)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("eagel", {}, "kind is 'eagel'; allowed: eagle3, eagle, medusa, hydra, small-model"),
        ("eagle", {"layers": (2,)}, r"layers is \(2,\); allowed: with kind eagle3, not eagle; leave"),
        ("eagle", {"token_weight": 0.0}, "token_weight is 0.*; give one"),
        ("eagle3", {"start": "zero"}, "start is 'zero'; allowed: target, random"),
        ("eagle3", {"num_heads": 3}, "num_heads is 3; allowed: with kind medusa and hydra, not eagle3; leave"),
        ("medusa", {"ttt_steps": 2}, "ttt_steps is 2; allowed: .* not medusa"),
        ("medusa", {"num_heads": 0}, "num_heads is 0; allowed: ≥ 1"),
        ("small-model", {"num_blocks": 2}, "num_blocks is 2; allowed: .* not small-model"),
    ],
)
def test_a_setting_of_another_kind_is_refused(kind: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings(kind, **change)


def test_the_defaults_follow_the_kind() -> None:
    eagle, medusa, small = (settings(kind) for kind in ("eagle3", "medusa", "small-model"))
    assert [s.batch_positions for s in (eagle, medusa, small)] == [4096, 2048, 2048]
    assert [s.total_positions for s in (eagle, medusa, small)] == [3_000_000, 400_000, 400_000]
    assert [s.muon_lr for s in (eagle, medusa, small)] == [0.02, 0.002, 0.02]
    assert settings("medusa", regress_positions=0).muon_lr == 0.02
    assert [s.vocabulary_size(49_152) for s in (eagle, medusa, small)] == [8192, 8192, 49_152]
    assert settings("medusa", total_positions=5).total_positions == 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_holds_what_has_an_effect(kind: str) -> None:
    record = settings_record(settings(kind))
    assert set(record) == settings_of(kind)
    assert changed_settings(settings(kind, workers=3, output="p"), record) == []
    assert changed_settings(settings(kind, lr=0.5), record) == ["lr: 0.001 → 0.5"]


def table() -> str:
    """The settings as docs/training.md lists them."""
    lines = ["| setting | what it does | methods |", "|---|---|---|"]
    for name, (each, meaning) in meanings(TrainSettings).items():
        if name not in ("target", "data", "output", "kind"):
            choices = f"{', '.join(f'`{choice}`' for choice in meaning.choices)}: " if meaning.choices else ""
            methods = ", ".join(meaning.only) or "all"
            lines.append(f"| `--{name.replace('_', '-')}` | {choices}{explanation(each, meaning)} | {methods} |")
    return "\n".join(lines)


def test_the_guide_lists_every_setting_as_the_fields_have_it() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    printed = guide.partition("<!-- settings -->")[2].partition("<!-- /settings -->")[0].strip()
    assert printed == table(), f"put this between the marks in docs/training.md:\n{table()}"
