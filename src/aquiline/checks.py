"""Checks of what users pass: one error that names the value and what is allowed in its place."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any


def check_kind(name: str, value: object, good: bool, allowed: str) -> None:
    """Refuses a value of another kind.

    Raises:
        TypeError: unless `good`.
    """
    if not good:
        raise TypeError(f"{name} is {value!r:.200}; allowed: {allowed}")


def check_value(name: str, value: object, good: bool, allowed: str) -> None:
    """Refuses a value out of range.

    Raises:
        ValueError: unless `good`.
    """
    if not good:
        raise ValueError(f"{name} is {value!r:.200}; allowed: {allowed}")


def integer(name: str, value: Any, least: int | None = None) -> int:
    """`value` as an int; integers of NumPy and PyTorch count, booleans do not.

    Raises:
        TypeError: if it is none.
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
    """`value` as a float.

    Raises:
        TypeError: if it is no real number.
    """
    check_kind(name, value, isinstance(value, Real) and not isinstance(value, bool), "a number")
    return float(value)


def flag(name: str, value: Any, *, optional: bool = False) -> None:
    """Refuses what is neither True nor False (nor None, if it is optional).

    Raises:
        TypeError: for anything else.
    """
    good = isinstance(value, bool) or (optional and value is None)
    check_kind(name, value, good, "True, False or None" if optional else "True or False")


def several(name: str, value: Any, allowed: str = "several, in a tuple") -> tuple[Any, ...]:
    """`value` as a tuple; texts are not several.

    Raises:
        TypeError: if it cannot be iterated over.
    """
    check_kind(name, value, isinstance(value, Iterable) and not isinstance(value, str | bytes), allowed)
    return tuple(value)
