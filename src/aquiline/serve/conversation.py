"""Reads the messages of a chat request, with the tools and variables of its template, into a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aquiline.engine.text import encode_prompt
from aquiline.serve.fields import ApiError, Fields, flag, invalid, listed, mapping, one_of, text

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def chat_tokens(tokenizer: Any, fields: Fields) -> list[int]:
    """Takes the fields of a conversation, and renders them with the chat template.

    Raises:
        ApiError: naming the field that is malformed, or that the template does not print.
    """
    messages = fields.need("messages", _messages)
    template = {
        "tools": fields.take("tools", _tools),
        "chat_template_kwargs": fields.take("chat_template_kwargs", mapping),
    }
    if fields.take("functions", listed):
        raise ApiError(400, "functions is not supported; send them as tools", param="functions")
    fields.take("parallel_tool_calls", flag)
    if fields.take("tool_choice", one_of("none", "auto")) == "none":
        template["tools"] = None  # a model calls no tool that it does not see
    try:
        return encode_prompt(tokenizer, messages, **template)
    except (ValueError, TypeError) as error:
        name = next((name for name in template if _renders(tokenizer, messages, template | {name: None})), "messages")
        raise ApiError(400, f"{name}: {error}", param=name) from error


def _renders(tokenizer: Any, messages: list[Mapping[str, Any]], template: Mapping[str, Any]) -> bool:
    try:
        return bool(encode_prompt(tokenizer, messages, **template))
    except (ValueError, TypeError):
        return False


def _messages(name: str, value: Any) -> list[Mapping[str, Any]]:
    if not listed(name, value):
        raise invalid(name, value, "at least one message")
    return [_message(f"{name}[{i}]", message) for i, message in enumerate(value)]


def _message(name: str, value: Any) -> Mapping[str, Any]:
    fields = Fields(value, name)
    role = _ROLES[fields.need("role", one_of(*_ROLES))]
    message: dict[str, Any] = {"role": role}
    if role == "assistant" and (calls := fields.take("tool_calls", _calls)):
        message |= {"content": fields.take("content", content_text, ""), "tool_calls": calls}
    else:
        message["content"] = fields.need("content", content_text)
    for field in ("tool_call_id", "name") if role == "tool" else ():
        if (given := fields.take(field, text)) is not None:
            message[field] = given
    # Clients send answers back as part of the conversation, where this is empty.
    fields.take("annotations", one_of([]))
    fields.done()
    return message


def _calls(name: str, value: Any) -> list[Mapping[str, Any]]:
    """Tool calls, with their arguments as objects: chat templates print those."""
    calls: list[Mapping[str, Any]] = []
    for i, call in enumerate(listed(name, value)):
        fields = Fields(call, f"{name}[{i}]")
        made: dict[str, Any] = {"type": fields.take("type", one_of("function"), "function")}
        if (identity := fields.take("id", text)) is not None:
            made["id"] = identity
        inner = Fields(fields.need("function", mapping), f"{name}[{i}].function")
        made["function"] = {"name": inner.need("name", text), "arguments": inner.take("arguments", _arguments, {})}
        inner.done()
        fields.done()
        calls.append(made)
    return calls


def _arguments(name: str, value: Any) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = mapping(name, json.loads(text(name, value)))
        return found
    except (ValueError, RecursionError) as error:
        raise invalid(name, value, "a JSON object, as text") from error


def _tools(name: str, value: Any) -> list[Mapping[str, Any]]:
    for i, tool in enumerate(listed(name, value)):
        fields = Fields(tool, f"{name}[{i}]")
        fields.need("type", one_of("function"))
        Fields(fields.need("function", mapping), f"{name}[{i}].function").need("name", text)
        fields.done()
    return list(value)


def content_text(name: str, value: Any) -> str:
    """Reads a content: a text, or parts of type "text"."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(name, value, 'a text or a list of parts of type "text"')
    texts = []
    for i, part in enumerate(value):
        fields = Fields(part, f"{name}[{i}]")
        fields.need("type", one_of("text"))
        texts.append(fields.need("text", text))
        fields.done()
    return "".join(texts)
