"""Checks of user input: each raises one error that names the value and what is allowed."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any


def check_kind(name: str, value: object, good: bool, allowed: str) -> None:
    """Rejects a value of the wrong type.

    Raises:
        TypeError: unless `good`.
    """
    if not good:
        raise TypeError(f"{name} is {value!r:.200}; allowed: {allowed}")


def check_value(name: str, value: object, good: bool, allowed: str) -> None:
    """Rejects a value outside its range.

    Raises:
        ValueError: unless `good`.
    """
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
    """Rejects values other than True and False (and None, if `optional`).

    Raises:
        TypeError: for any other value.
    """
    good = isinstance(value, bool) or (optional and value is None)
    check_kind(name, value, good, "True, False or None" if optional else "True or False")


def several(name: str, value: Any, allowed: str = "several, in a tuple") -> tuple[Any, ...]:
    """Converts `value` to a tuple.

    Raises:
        TypeError: for a text, and for anything that is not iterable.
    """
    check_kind(name, value, isinstance(value, Iterable) and not isinstance(value, str | bytes), allowed)
    return tuple(value)
