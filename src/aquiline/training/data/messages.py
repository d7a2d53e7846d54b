"""Reads the turns of a conversation, and identifies conversations by what their turns say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aquiline.training.data.sources import Unusable

NO_CONVERSATION = "no conversation"
EMPTY_TURN = "empty turn"
UNSUPPORTED = "unsupported content"
BAD_TEXT = "invalid Unicode"

_ROLE_NAMES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_WEIGHTS = ("weight", "train", "loss")


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        role: system, user, assistant or tool.
        content: plain text.
        reasoning: the thoughts before an assistant's content, where the record keeps them apart.
        tool_calls: the calls of an assistant's turn as JSON text (a list in OpenAI's form), or "".
        trained: False for an assistant's turn without loss.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: str = ""
    trained: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Returns the turn in the form that chat templates and servers take."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            turn["reasoning_content"] = self.reasoning
        if self.tool_calls:
            turn["tool_calls"] = json.loads(self.tool_calls)
        return turn


def parse_message(turn: object, number: int) -> Message:
    """Reads a turn of a record or of a server's answer.

    Raises:
        Unusable: the `number`-th turn has no known role, or holds something that cannot be used.
    """
    if not isinstance(turn, Mapping):
        raise Unusable(NO_CONVERSATION, f"turn {number} is {kind_of(turn)}, not an object")
    turn = {key: value for key, value in turn.items() if value is not None}
    name = turn.get("role", turn.get("from"))
    role = _ROLE_NAMES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        allowed = ", ".join(sorted(_ROLE_NAMES))
        raise Unusable(UNSUPPORTED, f"turn {number} has the role {name!r}; allowed: {allowed}")
    calls = _tool_calls(turn, number)
    content = turn.get("content", turn.get("value"))
    reasoning, content = _reasoning(turn, content, number)
    if content is None and (calls or reasoning):
        content = ""
    if role != "assistant" and (reasoning or calls):
        raise Unusable(
            UNSUPPORTED, f"turn {number} ({role}) holds reasoning or tool calls, which only an assistant has"
        )
    return Message(role, text_of(content, number), reasoning, calls, _trained(turn, number))


def _reasoning(turn: Mapping[str, Any], content: Any, number: int) -> tuple[str, Any]:
    """Returns the thoughts of a turn, and its content without parts that hold thoughts."""
    thoughts = [turn[key] for key in _REASONING if turn.get(key)]
    if isinstance(content, Sequence) and not isinstance(content, str):
        apart = [p for p in content if isinstance(p, Mapping) and p.get("type") in ("thinking", "reasoning")]
        thoughts += [part.get("thinking") or part.get("reasoning") or part.get("text") for part in apart]
        content = [part for part in content if part not in apart]
    if not all(isinstance(thought, str) for thought in thoughts):
        raise Unusable(UNSUPPORTED, f"turn {number} holds reasoning that is not text")
    return text_of("".join(dict.fromkeys(thoughts)), number), content


def _trained(turn: Mapping[str, Any], number: int) -> bool:
    weights = {key: turn[key] for key in _WEIGHTS if key in turn}
    for key, weight in weights.items():
        if weight not in (0, 1):
            raise Unusable(UNSUPPORTED, f"turn {number} has the {key} {weight!r}; allowed: 0 (no loss) or 1")
    return all(weights.values())


def _tool_calls(turn: Mapping[str, Any], number: int) -> str:
    """Returns a turn's tool calls as JSON text, with their arguments as objects."""
    given = turn.get("tool_calls") or ([{"function": turn["function_call"]}] if turn.get("function_call") else [])
    calls = []
    for call in given if isinstance(given, Sequence) and not isinstance(given, str) else [given]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Unusable(UNSUPPORTED, f"turn {number} calls tools without a function name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise Unusable(UNSUPPORTED, f"turn {number} calls a tool with arguments that are not JSON") from error
        calls.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
        if isinstance(call.get("id"), str):
            calls[-1]["id"] = call["id"]
    return json.dumps(calls, ensure_ascii=False) if calls else ""


def text_of(content: object, number: int) -> str:
    """Joins the text of a content, which may be a list of parts.

    Raises:
        Unusable: turn `number` has no content, parts that are not text, or invalid Unicode.
    """
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise Unusable(UNSUPPORTED, f"turn {number} holds parts that are not text")
        content = "".join(parts)  # type: ignore[arg-type]
    if content is None:
        raise Unusable(EMPTY_TURN, f"turn {number} has no content")
    if not isinstance(content, str):
        raise Unusable(UNSUPPORTED, f"turn {number}'s content is {kind_of(content)}, not text")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise Unusable(BAD_TEXT, f"turn {number} holds half a surrogate pair") from error
    return content


def kind_of(value: object) -> str:
    """Names a value's type in a refusal."""
    return "null" if value is None else type(value).__name__


def conversation_id(messages: Sequence[Message]) -> str:
    """Returns 16 hex digits that depend only on what the turns say."""
    apart = ([part for part in (m.reasoning, m.tool_calls) if part] for m in messages)
    return _digest([[m.role, m.content, *more] for m, more in zip(messages, apart, strict=True)])[:16]


def in_validation(messages: Sequence[Message], fraction: float) -> bool:
    """True if a conversation is held out; decided by a hash of its first user turn."""
    first = next(m.content.strip() for m in messages if m.role == "user")
    return int(_digest(first)[:16], 16) < fraction * 2**64


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
