"""Bounds what a chat template may cost: renders it once in a sandbox that counts steps and characters."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

_STEPS = 200_000
_CHARACTERS = 16 << 20
_LARGE = 1_000_000

_budget: ContextVar[_Budget] = ContextVar("budget")


class _Budget:
    """The steps and characters that one rendering may still use."""

    def __init__(self, size: int) -> None:
        self.steps = _STEPS + 8 * size
        self.characters = _CHARACTERS + 64 * size

    def step(self, count: int = 1) -> None:
        self.steps -= count
        if self.steps < 0:
            raise _too_costly(f"more than {_STEPS:,} steps")

    def write(self, count: int) -> None:
        self.characters -= count
        if self.characters < 0:
            raise _too_costly(f"more than {_CHARACTERS:,} characters")


def _too_costly(what: str) -> Exception:
    from jinja2 import TemplateRuntimeError

    return TemplateRuntimeError(f"it takes {what}; use another template")


FAILURES = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
"""Errors that a template may raise beside `TemplateError`."""


def check_cost(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> None:
    """Renders once, counting; all errors but those of the budget are left to the real rendering.

    Args:
        variables: all others, such as tools, special tokens and settings.

    Raises:
        TemplateError: if the rendering exceeds its budget.
    """
    from jinja2 import TemplateError

    turns = [{key: value for key, value in message.items() if value is not None} for message in messages]
    size = len(json.dumps([turns, variables], default=str))
    try:
        counted = _counted(source)
    except (TemplateError, RecursionError):
        return
    token = _budget.set(_Budget(size))
    try:
        counted.render(messages=turns, **variables)
    except TemplateError as error:
        if "it takes more than" in str(error):
            raise
    except FAILURES:
        pass
    finally:
        _budget.reset(token)


@functools.lru_cache(maxsize=8)
def _counted(source: str) -> Any:
    """Compiles a template so that loops, calls and growing values draw on the budget."""
    from jinja2 import Template, nodes

    environment = _environment()
    tree = environment.parse(source)
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, "counted_items", [], [], None, None, lineno=loop.lineno)
    for node in [tree, *list(tree.find_all(nodes.Node))]:
        for name, value in node.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(node, name, _joined(value))
            elif isinstance(value, list):
                value[:] = [_joined(item) if isinstance(item, nodes.Concat) else item for item in value]
    tree.set_environment(environment)
    return Template.from_code(environment, environment.compile(tree), environment.make_globals(None))


def _joined(node: Any) -> Any:
    from jinja2 import nodes

    items = nodes.List(node.nodes, lineno=node.lineno)
    return nodes.Filter(items, "counted_join", [], [], None, None, lineno=node.lineno)


def _environment() -> Any:
    from jinja2 import TemplateError, ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """The tag that marks the assistant's text for training; it prints its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Counted(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_operands(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            _budget.get().step()
            if isinstance(getattr(__obj, "__self__", None), str):
                _check_arguments(__obj.__name__, (__obj.__self__, *args, *kwargs.values()))
            return super().call(__context, __obj, *args, **kwargs)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = Counted(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    environment.concat = _counted_join  # type: ignore[method-assign]
    environment.filters = {name: _counted_filter(name, each) for name, each in environment.filters.items()}
    environment.filters |= {"counted_items": _counted_items, "counted_join": _counted_join, "tojson": _tojson}
    environment.globals["raise_exception"] = raise_exception
    environment.globals["lipsum"] = lambda *_, **__: raise_exception("it takes more than it may: lipsum")
    environment.globals["strftime_now"] = lambda form: form
    return environment


def _counted_items(items: Any) -> Any:
    budget = _budget.get()
    if not hasattr(items, "__len__"):
        items = list(itertools.islice(items, budget.steps + 1))
    budget.step(len(items) + 1)
    return items


def _counted_join(parts: Iterable[Any]) -> str:
    budget, texts = _budget.get(), []
    for part in parts:
        texts.append(str(part))
        budget.write(len(texts[-1]))
    return "".join(texts)


def _counted_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps the mark of filters that take the context
    def counted(*arguments: Any, **named: Any) -> Any:
        budget = _budget.get(None)
        if budget is None:  # the compiler evaluates constants
            raise nodes.Impossible
        budget.step()
        if name == "join":
            place = 1 if hasattr(function, "jinja_pass_arg") else 0
            items = list(_counted_items(arguments[place]))
            budget.write(sum(len(str(item)) for item in items))
            arguments = (*arguments[:place], items, *arguments[place + 1 :])
        _check_arguments(name, (*arguments, *named.values()))
        result = function(*arguments, **named)
        budget.write(len(result) if isinstance(result, str) else 0)
        budget.step(len(result) if isinstance(result, list) else 0)
        return result

    from jinja2 import nodes

    return counted


def _check_arguments(name: str, values: Iterable[Any]) -> None:
    """Rejects widths beyond the bounds, and texts from which `replace` or `join` may build too many characters."""
    sizes = 1
    for value in values:
        if isinstance(value, int) and value > _LARGE:
            raise _too_costly(f"more than {_LARGE:,} as an argument")
        sizes *= max(1, len(value)) if isinstance(value, str | list | tuple) else 1
        if name == "format" and isinstance(value, str) and re.search(r"\d{7}", value):
            raise _too_costly(f"more than {_LARGE:,} as a width")
    if name in ("replace", "join") and sizes > 1 << 28:
        raise _too_costly(f"more than {_CHARACTERS:,} characters")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    sizes = [len(value) if isinstance(value, str | list | tuple) else None for value in (left, right)]
    if operator == "+" and None not in sizes:
        _budget.get().write(sum(size or 0 for size in sizes))
    elif operator == "*" and sizes != [None, None]:
        count = left if sizes[0] is None else right
        _budget.get().write((sizes[0] or sizes[1] or 0) * count if isinstance(count, int) else 0)
    elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > 1 << 16:
            raise _too_costly(f"more than {1 << 16:,} bits in a number")
    elif operator == "%" and isinstance(left, str) and re.search(r"\d{7}|\*", left):
        raise _too_costly(f"more than {_LARGE:,} as a width")


def _tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})
