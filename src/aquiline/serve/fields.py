"""Reads JSON bodies strictly: an unknown field is an error that names it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

INVALID = "invalid_request_error"


class ApiError(Exception):
    """An error as OpenAI's clients expect it.

    Args:
        message: one sentence with the value, what is allowed, and the remedy.
        kind: OpenAI's `type`.
        code: OpenAI's `code`.
        retry_after: seconds for the header Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Disconnected(Exception):
    """The client closed the connection."""


def invalid(param: str, value: Any, allowed: str) -> ApiError:
    """Returns a 400 for one field."""
    return ApiError(400, f"{param} is {shown(value)}; allowed: {allowed}", param=param)


def shown(value: Any) -> str:
    """Returns a value as JSON for an error message, shortened if it is long."""
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:100] + "…"


def parse_json(raw: bytes) -> Any:
    """Parses a body.

    Raises:
        ApiError: unless it is JSON in UTF-8; NaN and infinities are not JSON.
    """

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(raw.decode("utf-8"), parse_constant=refuse, parse_float=_finite)
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply; send a flatter one") from error
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ApiError(400, f"the body is not JSON in UTF-8 ({error}); send a JSON object") from error


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


class Fields:
    """The fields of a JSON object, taken one by one; `done` rejects the rest.

    A field that is null counts as absent, as OpenAI's clients send it.

    Args:
        name: of the object in error messages; empty for the whole body.

    Raises:
        ApiError: unless `body` is an object.
    """

    def __init__(self, body: Any, name: str = "") -> None:
        self._prefix = f"{name}." if name else ""
        self._left = dict(mapping(name or "the body", body))

    def name(self, field: str) -> str:
        """The field's name in error messages."""
        return self._prefix + field

    def take(self, field: str, read: Callable[[str, Any], T], default: Any = None) -> Any:
        """Returns a field as `read(name, value)` makes it, or `default` if it is absent."""
        value = self._left.pop(field, None)
        return default if value is None else read(self.name(field), value)

    def need(self, field: str, read: Callable[[str, Any], T]) -> T:
        """Returns a required field.

        Raises:
            ApiError: if it is absent.
        """
        value = self._left.pop(field, None)
        if value is None:
            raise ApiError(400, f"{self.name(field)} is missing; send it", param=self.name(field))
        return read(self.name(field), value)

    def done(self) -> None:
        """Rejects fields that were not taken.

        Raises:
            ApiError: naming the first of them.
        """
        left = sorted(name for name, value in self._left.items() if value is not None)
        if left:
            name = self.name(left[0])[:100]
            raise ApiError(400, f"{shown(name)} is not supported; drop it", param=name, code="unsupported_parameter")


def _of_kind(kind: type, allowed: str) -> Callable[[str, Any], Any]:
    def read(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise invalid(name, value, allowed)
        return value

    return read


text, flag = _of_kind(str, "a text"), _of_kind(bool, "true or false")
listed, mapping = _of_kind(list, "a list"), _of_kind(dict, "a JSON object")


def integer(least: int, most: int = (1 << 63) - 1) -> Callable[[str, Any], int]:
    """Returns a reader of integers from `least` to `most`."""

    def read(name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise invalid(name, value, f"an integer {least} … {most}")
        return value

    return read


def number(least: float, most: float, excluded: float | None = None) -> Callable[[str, Any], float]:
    """Returns a reader of numbers from `least` to `most`, but not the bound `excluded`."""

    def read(name: str, value: Any) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
        if not good or value == excluded:
            raise invalid(
                name, value, f"a number {least:g} … {most:g}" + ("" if excluded is None else f", not {excluded:g}")
            )
        return float(value)

    return read


def one_of(*allowed: Any) -> Callable[[str, Any], Any]:
    """Returns a reader of the given values."""

    def read(name: str, value: Any) -> Any:
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise invalid(name, value, ", ".join(json.dumps(each) for each in allowed))
        return value

    return read


def strings(name: str, value: Any) -> tuple[str, ...]:
    """A text or a list of them, none empty."""
    values = [value] if isinstance(value, str) else value
    good = isinstance(values, list) and len(values) <= 16 and all(isinstance(each, str) and each for each in values)
    if not good:
        raise invalid(name, value, "a text or a list of at most 16, none of them empty")
    return tuple(values)


def biases(name: str, value: Any) -> Mapping[int, float]:
    """An object: token id as a text → number -100 … 100."""
    found = {}
    for key, bias in mapping(name, value).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise invalid(name, key, 'token ids as texts, such as {"17": -1}')
        found[int(key)] = number(-100, 100)(f"{name}.{key}", bias)
    return found


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A list of token ids."""
    return tuple(integer(0, (1 << 31) - 1)(name, each) for each in listed(name, value))
