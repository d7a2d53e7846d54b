"""Settings with a meaning: what they reject, and what `--help` says of every option."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, dataclass
from typing import Any

import pytest

from aquiline.checks import check_settings, explanation, meanings, setting
from aquiline.cli import COMMANDS, build_parser
from aquiline.commands.common import add_setting_options, given_settings, integer_of


@dataclass(frozen=True)
class Sizes:
    folder: str = setting(MISSING, "where")
    length: int = setting(8, "how long", unit="tokens", allowed="≥ 2")
    rates: tuple[float, ...] = setting((), "how fast", allowed="> 0", shown="by size")
    part: float = setting(0.5, "of it", allowed="0 … < 1")
    share: float = setting(None, "how much", allowed="0 … 1", by_kind={"a": 0.1, "b": 0.2, "c": 0.1})
    colour: str | None = setting(None, "which", choices=("red", "green"))
    loud: bool = setting(False, "more words, 5% of them useful")

    def __post_init__(self) -> None:
        check_settings(self)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"length": 1}, "length is 1; allowed: ≥ 2"),
        ({"rates": (1.0, 0.0)}, r"rates is \(1.0, 0.0\); allowed: > 0"),
        ({"share": float("nan")}, "share is nan; allowed: a finite number 0 … 1"),
        ({"part": 1.0}, "part is 1.0; allowed: 0 … < 1"),
        ({"share": 1.01}, "share is 1.01; allowed: 0 … 1"),
        ({"colour": "blue"}, "colour is 'blue'; allowed: red, green"),
    ],
)
def test_values_outside_the_range_are_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Sizes("x", **values)


def test_the_ends_of_a_range_are_in_it_and_none_passes() -> None:
    least = Sizes("x", length=2, rates=(1e-9,), share=0.0)
    assert (least.length, tuple(least.rates or ()), least.share) == (2, (1e-9,), 0.0)
    assert Sizes("x", share=1.0).share == 1.0


def test_an_explanation_has_unit_range_and_default() -> None:
    texts = {name: explanation(*both) for name, both in meanings(Sizes).items()}
    assert texts["folder"] == "where (required)"
    assert texts["length"] == "how long (tokens ≥ 2; default: 8)"
    assert texts["rates"] == "how fast (> 0; default: by size)"
    assert texts["share"] == "how much (0 … 1; default: 0.1 for a and c, 0.2 for b)"


def test_options_become_settings() -> None:
    parser = argparse.ArgumentParser()
    add_setting_options(parser, Sizes, set(meanings(Sizes)) - {"share", "part"})
    parsed = parser.parse_args(["--folder", "f", "--length", "1e3", "--rates", "1", "2", "--loud"])
    assert given_settings(parsed, Sizes) == {"folder": "f", "length": 1000, "rates": (1.0, 2.0), "loud": True}
    assert "5% of them" in " ".join(parser.format_help().split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_does(command: str) -> None:
    parser = build_parser(command)
    choices: Any = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    silent = [action.dest for action in choices[command]._actions if not action.help]
    assert not silent, f"{silent} of {command} have no help"
    numbers = [action for action in choices[command]._actions if action.type in (int, float, integer_of)]
    endless = [action.dest for action in numbers if not any(sign in (action.help or "") for sign in "≥>…<")]
    assert not endless, f"the help of {endless} of {command} names no range"
