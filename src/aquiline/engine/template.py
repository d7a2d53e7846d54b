"""Applies chat templates, and rejects those that drop a message, ignore a setting, or cost too much."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aquiline.engine.template_cost import FAILURES, check_cost

_MARKER = "qzPROBEzq"


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
        prompt: end with the start of the next answer.
        template: replaces the tokenizer's own template.
        tools: descriptions (JSON schema) of the tools that the model may call.
        settings: variables of the template, such as ``enable_thinking``.

    Raises:
        ValueError: the template rejects the messages, fails, costs too much, ignores a setting or the tools, or
            drops a message or a tool call.
        TypeError: for a tool or a call without a name.
    """
    called = [call for message in messages for call in message.get("tool_calls") or ()]
    named = [("tool", _function_name(tool)) for tool in tools] + [("call of", _function_name(call)) for call in called]
    source = template or tokenizer.get_chat_template(tools=list(tools) or None)
    _check_settings(tokenizer, source, settings or {})
    if tools and "tools" not in source:
        raise ValueError("the chat template does not use tools; leave them out, or use a template that prints them")
    variables = {"tools": list(tools) or None, "add_generation_prompt": prompt, **(settings or {})}
    text = _first_lossless(messages, lambda turns: _rendered(tokenizer, source, turns, variables))
    for kind, name in named:
        if name not in text:
            raise ValueError(f"the chat template does not print the {kind} {name!r}; use a template that prints tools")
    return text


def _function_name(described: Any) -> str:
    """Returns the name of a tool, or of the tool that a call names."""
    function = described.get("function", described) if isinstance(described, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise TypeError(
            f"{described!r:.200} is not a tool or a call of one; allowed: "
            "{'type': 'function', 'function': {'name': …}}"
        )
    return name


def _first_lossless(
    messages: Sequence[Mapping[str, Any]], rendered: Callable[[Sequence[Mapping[str, Any]]], str]
) -> str:
    """Renders the contents as given, as texts and as parts; returns the first text that contains all of them."""
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


def _rendered(tokenizer: Any, source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    from jinja2 import TemplateError

    try:
        check_cost(source, messages, {**tokenizer.special_tokens_map, **variables})
        text: str = tokenizer.apply_chat_template(list(messages), chat_template=source, tokenize=False, **variables)
    except TemplateError as error:
        raise ValueError(f"the chat template rejects the messages: {error}") from error
    except FAILURES as error:
        raise ValueError(
            f"the chat template fails on the messages ({type(error).__name__}: {error}); check their roles and "
            "contents, or pass the text with raw=True"
        ) from error
    return text
