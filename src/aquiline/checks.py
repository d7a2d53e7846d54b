"""Checks of user input: each raises one error that names the value and what is allowed."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

SEEDS = "0 … 4294967295"
"""Range of the seeds that settings take: 32 bits."""


def check_kind(name: str, value: object, good: bool, allowed: str) -> None:
    """Raises TypeError unless `good`."""
    if not good:
        raise TypeError(f"{name} is {value!r:.200}; allowed: {allowed}")


def check_value(name: str, value: object, good: bool, allowed: str) -> None:
    """Raises ValueError unless `good`."""
    if not good:
        raise ValueError(f"{name} is {value!r:.200}; allowed: {allowed}")


def integer(name: str, value: Any, least: int | None = None) -> int:
    """Converts `value` to an int; accepts NumPy and PyTorch integers, rejects booleans.

    Raises:
        TypeError: if it is not an integer.
        ValueError: if it is below `least`.
    """
    allowed = "an integer" if least is None else f"an integer ≥ {least}"
    check_kind(name, value, hasattr(value, "__index__") and not isinstance(value, bool), allowed)
    try:
        result = operator.index(value)
    except TypeError as error:  # an array or a tensor of several numbers
        raise TypeError(f"{name} is {value!r:.200}; allowed: {allowed}") from error
    check_value(name, result, least is None or result >= least, f"≥ {least}")
    return result


def number(name: str, value: Any) -> float:
    """Converts `value` to a float.

    Raises:
        TypeError: if it is not a real number.
    """
    check_kind(name, value, isinstance(value, Real) and not isinstance(value, bool), "a number")
    return float(value)


def flag(name: str, value: Any, *, optional: bool = False) -> None:
    """Raises TypeError unless `value` is True or False (or None, if `optional`)."""
    good = isinstance(value, bool) or (optional and value is None)
    check_kind(name, value, good, "True, False or None" if optional else "True or False")


def several(name: str, value: Any, allowed: str = "several, in a tuple") -> tuple[Any, ...]:
    """Converts `value` to a tuple.

    Raises:
        TypeError: for a text, and for anything that is not iterable.
    """
    check_kind(name, value, isinstance(value, Iterable) and not isinstance(value, str | bytes), allowed)
    return tuple(value)


@dataclass(frozen=True)
class Meaning:
    """The meaning of a setting: the one source of its check, its ``--help`` and its row in the docs.

    Attributes:
        text: what it does.
        unit: of its number, or of each of its numbers.
        allowed: range of its numbers: "≥ 1", "> 0", "0 … 1", or "0 … < 1" without its end.
        choices: its values, where they are names.
        shown: the default in words, where the value does not say it.
        only: kinds of run that it has an effect on; empty: all.
        by_kind: kind of run → default that takes the place of None.
        flag: name of its option, where that differs from the field's.
    """

    text: str
    unit: str = ""
    allowed: str = ""
    choices: tuple[str, ...] = ()
    shown: str = ""
    only: tuple[str, ...] = ()
    by_kind: Mapping[str, Any] = field(default_factory=dict)
    flag: str = ""


def setting(default: Any, text: str, **more: Any) -> Any:
    """A dataclass field with a meaning.

    Args:
        default: its default; `dataclasses.MISSING` where it must be given.
        text: see `Meaning`, as for `more`.
    """
    return field(default=default, metadata={"meaning": Meaning(text, **more)})


def meanings(settings: Any) -> dict[str, tuple[dataclasses.Field[Any], Meaning]]:
    """Name → (field, meaning) of a dataclass's settings, in order."""
    fields = dataclasses.fields(settings)
    return {each.name: (each, each.metadata["meaning"]) for each in fields if "meaning" in each.metadata}


def check_settings(settings: Any) -> None:
    """Rejects settings outside their meaning, NaN among them; None passes.

    Raises:
        ValueError: naming the setting, its value and what is allowed.
    """
    for name, (_, meaning) in meanings(settings).items():
        value = getattr(settings, name)
        for part in value if isinstance(value, tuple) else (value,):
            if part is not None and meaning.choices:
                check_value(name, part, part in meaning.choices, ", ".join(meaning.choices))
            elif part is not None and meaning.allowed and not within(part, meaning.allowed):
                finite = "" if math.isfinite(part) else "a finite number "
                raise ValueError(f"{name} is {value}; allowed: {finite}{meaning.allowed}")


def within(value: float, allowed: str) -> bool:
    """True if a finite number lies in a range as `Meaning` writes it."""
    if not math.isfinite(value):
        return False
    if "…" in allowed:
        low, high = allowed.split("…")
        below = value < float(high.strip(" <")) if "<" in high else value <= float(high)
        return float(low) <= value and below
    sign, bound = allowed.split()
    return value >= float(bound) if sign == "≥" else value > float(bound)


def explanation(each: dataclasses.Field[Any], meaning: Meaning) -> str:
    """A setting in one line: text, unit, range and default; ``--help`` and the docs' table show the choices."""
    details = [" ".join(filter(None, (meaning.unit, meaning.allowed))), default_of(each, meaning)]
    return f"{meaning.text} ({'; '.join(filter(None, details))})"


def default_of(each: dataclasses.Field[Any], meaning: Meaning) -> str:
    """A setting's default in words."""
    if each.default is dataclasses.MISSING:
        return "required"
    if meaning.shown or not meaning.by_kind:
        return f"default: {meaning.shown or _shown(each.default)}"
    kinds: dict[str, list[str]] = {}
    for kind, value in meaning.by_kind.items():
        kinds.setdefault(_shown(value), []).append(kind)
    return "default: " + ", ".join(f"{value} for {' and '.join(names)}" for value, names in kinds.items())


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "on", False: "off", None: "none"}[value]
    if isinstance(value, tuple):
        return " ".join(map(_shown, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)
