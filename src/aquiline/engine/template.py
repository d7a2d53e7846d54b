"""Applies chat templates: foreign code, whose cost is bounded and which may drop no message."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

_STEPS = 200_000
_CHARACTERS = 16 << 20
_LARGE = 1_000_000
_MARKER = "qzPROBEzq"

_budget: ContextVar[_Budget] = ContextVar("budget")


def apply_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    prompt: bool = True,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Renders messages as `tokenizer.apply_chat_template` does.

    Contents are passed as they are, a text or a list of text parts. If the template fails on that form or drops a
    content, the other form is tried.

    Args:
        tokenizer: a transformers tokenizer.
        messages: with "role" and "content".
        prompt: end with the start of the next answer.
        template: replaces the tokenizer's own template.
        tools: descriptions (JSON schema) of the tools that the model may call.
        settings: variables of the template, such as ``enable_thinking``.

    Raises:
        ValueError: the template rejects the messages, fails, costs too much, ignores a setting or the tools, or
            drops a message.
    """
    settings = settings or {}
    source = template or tokenizer.get_chat_template(tools=list(tools) or None)
    _check_settings(tokenizer, source, settings)
    if tools and "tools" not in source:
        raise ValueError("the chat template does not use tools; leave them out, or use a template that prints them")

    def rendered(turns: Sequence[Mapping[str, Any]]) -> str:
        return _rendered(tokenizer, source, turns, prompt, tools, settings)

    forms = [list(messages), [_flat(m) for m in messages], [_parted(m) for m in messages]]
    trouble: ValueError | None = None
    for number, turns in enumerate(forms):
        if turns in forms[:number]:
            continue
        try:
            text = rendered(turns)
        except ValueError as error:
            trouble = trouble or error
            continue
        lost = next((i for i, turn in enumerate(turns) if _lost(i, turn, turns, text, rendered)), None)
        if lost is None:
            _check_tools(tools, text)
            return text
        trouble = trouble or ValueError(
            f"the chat template drops the content of message {lost + 1} ({turns[lost]['role']}); "
            "use another template, or pass the text with raw=True"
        )
    assert trouble is not None
    raise trouble


def _check_settings(tokenizer: Any, source: str, settings: Mapping[str, Any]) -> None:
    reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} if settings else set()
    for name in settings:
        if name in reserved or not re.search(rf"\b{re.escape(name)}\b", source):
            raise ValueError(
                f"the chat template has no setting {name!r}; allowed: variables that it reads, such as enable_thinking"
            )


def _check_tools(tools: Sequence[Mapping[str, Any]], text: str) -> None:
    for tool in tools:
        name = (tool.get("function") or tool).get("name")
        if isinstance(name, str) and name not in text:
            raise ValueError(f"the chat template does not print the tool {name!r}; use a template that prints tools")


def _flat(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": "".join(part["text"] for part in content)} if isinstance(content, list) else message


def _parted(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _lost(
    index: int,
    turn: Mapping[str, Any],
    turns: Sequence[Mapping[str, Any]],
    text: str,
    rendered: Callable[[Sequence[Mapping[str, Any]]], str],
) -> bool:
    """True if the text does not depend on a message's content, or holds a list of parts as Python prints it."""
    content = turn.get("content")
    if not content:
        return False
    if isinstance(content, list) and str(content) in text:
        return True
    parts = [content] if isinstance(content, str) else [part["text"] for part in content]
    if all(part.strip() in text for part in parts):
        return False
    # Templates may change a content: trim lines, drop thoughts, escape it. Another content shows whether it counts.
    other = _MARKER if isinstance(content, str) else [{"type": "text", "text": _MARKER}]
    try:
        return rendered([*turns[:index], {**turn, "content": other}, *turns[index + 1 :]]) == text
    except ValueError:
        return False


def _rendered(
    tokenizer: Any,
    source: str,
    messages: Sequence[Mapping[str, Any]],
    prompt: bool,
    tools: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> str:
    from jinja2 import TemplateError

    try:
        _check_cost(tokenizer, source, messages, prompt, tools, settings)
        text: str = tokenizer.apply_chat_template(
            list(messages),
            chat_template=source,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=prompt,
            **settings,
        )
    except TemplateError as error:
        raise ValueError(f"the chat template rejects the messages: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"the chat template fails on the messages ({type(error).__name__}: {error}); check their roles and "
            "contents, or pass the text with raw=True"
        ) from error
    return text


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


def _check_cost(
    tokenizer: Any,
    source: str,
    messages: Sequence[Mapping[str, Any]],
    prompt: bool,
    tools: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> None:
    """Renders once with a count of steps and characters, and raises a `TemplateError` when they exceed the budget.

    All other errors are left to the real rendering.
    """
    from jinja2 import TemplateError

    variables: dict[str, Any] = {**tokenizer.special_tokens_map, **settings}
    turns = [{key: value for key, value in message.items() if value is not None} for message in messages]
    size = len(json.dumps([turns, list(tools)], default=str))
    try:
        counted = _counted(source)
    except (TemplateError, RecursionError):
        return
    token = _budget.set(_Budget(size))
    try:
        counted.render(messages=turns, tools=list(tools) or None, add_generation_prompt=prompt, **variables)
    except TemplateError as error:
        if "it takes more than" in str(error):
            raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError):
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
