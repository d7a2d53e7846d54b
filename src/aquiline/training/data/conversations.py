"""Turns raw records of many formats into conversations.

An unusable record becomes a `Refusal` with its place and the reason. Everything that a record holds about its
conversation is used, counted in `Conversation.adjusted`, or a reason to refuse it; nothing is repaired silently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aquiline.training.data.sources import Unusable, read_records

NO_CONVERSATION = "no conversation"
ROLES = "roles out of order"
EMPTY_TURN = "empty turn"
UNSUPPORTED = "unsupported content"
BAD_TEXT = "invalid Unicode"
NO_LOSS = "no answer with loss"

LEADING_DROPPED = "leading assistant turn dropped"
TRAILING_DROPPED = "trailing user turn dropped"

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
_TURNS = ("messages", "conversations", "conversation")
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


@dataclass(frozen=True, eq=False)
class Conversation:
    """A usable record: [system], then user and assistant in turn, ending with assistant.

    An assistant's turn with tool calls is followed by tool turns and another assistant's turn.

    Attributes:
        messages: the turns; empty if `text` is given.
        source: name of the file or dataset.
        index: from 1: lines of a JSONL file, records of any other source.
        adjusted: names of the turns that were dropped.
        finished: False if the record says ``"finished": false``: a token budget cut off its last answer.
        text: the conversation as a template printed it, with its special tokens.
        tools: descriptions of the tools that the assistant may call.
        chat_template_kwargs: variables for the chat template (``chat_template_kwargs``).
    """

    messages: tuple[Message, ...]
    source: str
    index: int
    adjusted: tuple[str, ...] = ()
    finished: bool = True
    text: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """An unusable record: its place, the kind of reason, and details."""

    source: str
    index: int
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.source}, record {self.index}: {self.reason} ({self.detail})"


def read_conversations(source: str | Path) -> Iterator[Conversation | Refusal]:
    """Streams a source's records as conversations or refusals, in order, in constant memory.

    Understood records: ShareGPT (``conversations`` of ``from``/``value``), OpenAI style (``messages`` of
    ``role``/``content``, or the list alone), Alpaca style (``instruction``, ``input``, ``output``, ``history``),
    ``prompt``/``completion`` (texts or lists of messages), and ``text`` (already printed by a chat template).
    ``tools`` and ``chat_template_kwargs`` apply to the record. A null, and an empty list beside a full one, count
    as absent: Parquet fills absent columns so.

    An assistant's turn may hold its thoughts apart (``reasoning_content``, ``reasoning`` or ``thinking``), calls
    of tools, and its weight in the loss, 0 or 1 (``weight``, ``train`` or ``loss``).

    Understood containers: JSON array, JSONL, one JSON object after another, all of these gzipped, Parquet,
    Arrow IPC (file or stream), and dataset names (``owner/name``, ``owner/name:split`` or
    ``owner/name:config:split``). A JSON or gzip source that ends in the middle of a record yields every whole
    record before it and then one refusal with the reason `CUT`.

    Raises:
        ValueError: the source is neither a file nor a loadable dataset, or its container is not
            one of the above.
    """
    name = Path(source).name if Path(source).exists() else str(source)
    for index, record in read_records(source):
        try:
            if isinstance(record, Unusable):
                raise record
            yield _conversation(record, name, index)
        except Unusable as error:
            yield Refusal(name, index, error.reason, error.detail)


def _conversation(record: Any, name: str, index: int) -> Conversation:
    if isinstance(record, list) and record and isinstance(record[0], Mapping):
        record = {"messages": record}
    if not isinstance(record, Mapping):
        raise Unusable(NO_CONVERSATION, f"the record is {_kind(record)}, not an object")
    record = {key: value for key, value in record.items() if value is not None}
    settings = record.get("chat_template_kwargs", {})
    if not isinstance(settings, Mapping):
        raise Unusable(UNSUPPORTED, f"'chat_template_kwargs' is {_kind(settings)}, not an object")
    common: dict[str, Any] = {"source": name, "index": index, "chat_template_kwargs": settings, "tools": _tools(record)}
    finished = record.get("finished", True)
    if not isinstance(finished, bool):
        raise Unusable(UNSUPPORTED, f"'finished' is {finished!r}; allowed: true or false")
    if isinstance(record.get("text"), str) and not any(record.get(key) for key in (*_TURNS, "instruction", "prompt")):
        return Conversation((), text=_text(record["text"], 1), finished=finished, **common)
    turns = _turns(record)
    system = next((record[key] for key in ("system", "system_prompt") if record.get(key)), None)
    if system and (not turns or turns[0].role != "system") and (text := _text(system, 0)).strip():
        turns.insert(0, Message("system", text))
    adjusted = _trim(turns)
    # A dropped trailing user turn proves that the answer before it was complete.
    return Conversation(tuple(turns), adjusted=adjusted, finished=finished or TRAILING_DROPPED in adjusted, **common)


def _trim(turns: list[Message]) -> tuple[str, ...]:
    """Drops half exchanges at both ends, names them, and checks the rest."""
    adjusted = []
    start = 1 if turns and turns[0].role == "system" else 0
    # ShareGPT split its long conversations, sometimes in the middle of an exchange.
    if len(turns) > start and turns[start].role == "assistant":
        del turns[start]
        adjusted.append(LEADING_DROPPED)
    if len(turns) > start + 1 and turns[-1].role == "user":
        del turns[-1]
        adjusted.append(TRAILING_DROPPED)
    _check(turns, start)
    return tuple(adjusted)


def _turns(record: Mapping[str, Any]) -> list[Message]:
    lists = [(key, record[key]) for key in _TURNS if key in record]
    for key, turns in sorted(lists, key=lambda pair: pair[1] in ([], ())):
        if not isinstance(turns, Sequence) or isinstance(turns, str):
            raise Unusable(NO_CONVERSATION, f"{key!r} is {_kind(turns)}, not a list")
        if turns or not {"instruction", "prompt"} & record.keys():
            return [parse_message(turn, number) for number, turn in enumerate(turns, 1)]
    if "instruction" in record:
        return _alpaca(record)
    if "prompt" in record:
        return [*_side(record["prompt"], "user", 1), *_side(record.get("completion"), "assistant", 2)]
    keys = ", ".join(sorted(map(str, record))[:8]) or "none"
    raise Unusable(
        NO_CONVERSATION,
        f"no 'messages', 'conversations', 'instruction' + 'output', 'prompt' + 'completion' or 'text'; keys: {keys}",
    )


def _alpaca(record: Mapping[str, Any]) -> list[Message]:
    turns = []
    history = record.get("history", ())
    for pair in history if isinstance(history, Sequence) else (history,):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise Unusable(UNSUPPORTED, "'history' is not a list of [question, answer]")
        turns += [Message("user", _text(pair[0], 1)), Message("assistant", _text(pair[1], 2))]
    question = _text(record["instruction"], len(turns) + 1)
    extra = _text(record.get("input") or "", len(turns) + 1)
    if extra.strip():
        question = f"{question}\n\n{extra}"
    return [*turns, Message("user", question), Message("assistant", _text(record.get("output"), len(turns) + 2))]


def _side(value: Any, role: str, number: int) -> list[Message]:
    """One side of a prompt/completion record: a text, or messages."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [parse_message(turn, number + offset) for offset, turn in enumerate(value)]
    return [Message(role, _text(value, number))]


def parse_message(turn: object, number: int) -> Message:
    """Reads a turn of a record or of a server's answer.

    Raises:
        Unusable: the `number`-th turn has no known role, or holds something that cannot be used.
    """
    if not isinstance(turn, Mapping):
        raise Unusable(NO_CONVERSATION, f"turn {number} is {_kind(turn)}, not an object")
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
    return Message(role, _text(content, number), reasoning, calls, _trained(turn, number))


def _reasoning(turn: Mapping[str, Any], content: Any, number: int) -> tuple[str, Any]:
    """Returns the thoughts of a turn, and its content without parts that hold thoughts."""
    thoughts = [turn[key] for key in _REASONING if turn.get(key)]
    if isinstance(content, Sequence) and not isinstance(content, str):
        apart = [p for p in content if isinstance(p, Mapping) and p.get("type") in ("thinking", "reasoning")]
        thoughts += [part.get("thinking") or part.get("reasoning") or part.get("text") for part in apart]
        content = [part for part in content if part not in apart]
    if not all(isinstance(thought, str) for thought in thoughts):
        raise Unusable(UNSUPPORTED, f"turn {number} holds reasoning that is not text")
    return _text("".join(dict.fromkeys(thoughts)), number), content


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


def _tools(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = record.get("tools") or record.get("functions") or ()
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except (ValueError, RecursionError) as error:
        raise Unusable(UNSUPPORTED, "'tools' is not JSON") from error
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise Unusable(UNSUPPORTED, "'tools' is not a list of objects")
    return tuple(tools)


def _text(content: object, number: int) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise Unusable(UNSUPPORTED, f"turn {number} holds parts that are not text")
        content = "".join(parts)  # type: ignore[arg-type]
    if content is None:
        raise Unusable(EMPTY_TURN, f"turn {number} has no content")
    if not isinstance(content, str):
        raise Unusable(UNSUPPORTED, f"turn {number}'s content is {_kind(content)}, not text")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise Unusable(BAD_TEXT, f"turn {number} holds half a surrogate pair") from error
    return content


def _check(turns: Sequence[Message], start: int) -> None:
    if len(turns) < start + 2:
        raise Unusable(NO_CONVERSATION, "no user turn with an answer")
    expected: tuple[str, ...] = ("user",)
    for number, turn in enumerate(turns[start:], start + 1):
        if turn.role not in expected:
            raise Unusable(ROLES, f"turn {number} is {turn.role}, expected {' or '.join(expected)}")
        if not (turn.content.strip() or turn.reasoning or turn.tool_calls):
            raise Unusable(EMPTY_TURN, f"turn {number} ({turn.role}) is empty")
        if turn.role == "assistant":
            expected = ("tool",) if turn.tool_calls else ("user",)
        else:
            expected = ("assistant", "tool") if turn.role == "tool" else ("assistant",)
    if turns[-1].role == "tool":
        raise Unusable(ROLES, f"turn {len(turns)} is tool, expected assistant after it")
    if not any(turn.trained for turn in turns if turn.role == "assistant"):
        raise Unusable(NO_LOSS, "every answer has the weight 0")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
