"""Turns raw records of many formats into conversations.

An unusable record becomes a `Refusal` with its place and the reason. Everything that a record holds about its
conversation is used, counted in `Conversation.adjusted`, or a reason to refuse it; nothing is repaired silently.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aquiline.training.data.messages import (
    EMPTY_TURN,
    NO_CONVERSATION,
    UNSUPPORTED,
    Message,
    kind_of,
    parse_message,
    text_of,
)
from aquiline.training.data.sources import Unusable, read_records

ROLES = "roles out of order"
NO_LOSS = "no answer with loss"
LEADING_DROPPED = "leading assistant turn dropped"
TRAILING_DROPPED = "trailing user turn dropped"

_KEPT = 20
_TURNS = ("messages", "conversations", "conversation")


@dataclass(frozen=True, eq=False)
class Conversation:
    """A usable record: [system], then user and assistant in turn, ending with assistant, or with a question to answer.

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


@dataclass
class Refusals:
    """Refusals counted by reason, and the messages of the first twenty."""

    counts: Counter[str] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)

    def add(self, refusal: Refusal) -> None:
        """Counts a refusal."""
        self.counts[refusal.reason] += 1
        if len(self.first) < _KEPT:
            self.first.append(str(refusal))


def read_conversations(source: str | Path, *, unanswered: bool = False) -> Iterator[Conversation | Refusal]:
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

    Args:
        source: a file or dataset name.
        unanswered: keep a last user turn without an answer, and records with no other turn (``prompt`` or
            ``instruction`` alone): somebody will answer it.

    Raises:
        ValueError: the source is neither a file nor a loadable dataset, or its container is not
            one of the above.
    """
    name = Path(source).name if Path(source).exists() else str(source)
    for index, record in read_records(source):
        try:
            if isinstance(record, Unusable):
                raise record
            yield _conversation(record, name, index, unanswered)
        except Unusable as error:
            yield Refusal(name, index, error.reason, error.detail)


def _conversation(record: Any, name: str, index: int, unanswered: bool) -> Conversation:
    if isinstance(record, list) and record and isinstance(record[0], Mapping):
        record = {"messages": record}
    if not isinstance(record, Mapping):
        raise Unusable(NO_CONVERSATION, f"the record is {kind_of(record)}, not an object")
    record = {key: value for key, value in record.items() if value is not None}
    settings = record.get("chat_template_kwargs", {})
    if not isinstance(settings, Mapping):
        raise Unusable(UNSUPPORTED, f"'chat_template_kwargs' is {kind_of(settings)}, not an object")
    common: dict[str, Any] = {"source": name, "index": index, "chat_template_kwargs": settings, "tools": _tools(record)}
    finished = record.get("finished", True)
    if not isinstance(finished, bool):
        raise Unusable(UNSUPPORTED, f"'finished' is {finished!r}; allowed: true or false")
    if isinstance(record.get("text"), str) and not any(record.get(key) for key in (*_TURNS, "instruction", "prompt")):
        return Conversation((), text=text_of(record["text"], 1), finished=finished, **common)
    turns = _turns(record, unanswered)
    system = next((record[key] for key in ("system", "system_prompt") if record.get(key)), None)
    if system and (not turns or turns[0].role != "system") and (text := text_of(system, 0)).strip():
        turns.insert(0, Message("system", text))
    adjusted = _trim(turns, unanswered)
    # A dropped trailing user turn proves that the answer before it was complete.
    return Conversation(tuple(turns), adjusted=adjusted, finished=finished or TRAILING_DROPPED in adjusted, **common)


def _trim(turns: list[Message], unanswered: bool) -> tuple[str, ...]:
    """Drops half exchanges at both ends, except one to be answered, names them, and checks the rest."""
    adjusted = []
    start = 1 if turns and turns[0].role == "system" else 0
    # ShareGPT split its long conversations, sometimes in the middle of an exchange.
    if len(turns) > start and turns[start].role == "assistant":
        del turns[start]
        adjusted.append(LEADING_DROPPED)
    if not unanswered and len(turns) > start + 1 and turns[-1].role == "user":
        del turns[-1]
        adjusted.append(TRAILING_DROPPED)
    _check(turns, start, unanswered)
    return tuple(adjusted)


def _turns(record: Mapping[str, Any], unanswered: bool) -> list[Message]:
    lists = [(key, record[key]) for key in _TURNS if key in record]
    for key, turns in sorted(lists, key=lambda pair: pair[1] in ([], ())):
        if not isinstance(turns, Sequence) or isinstance(turns, str):
            raise Unusable(NO_CONVERSATION, f"{key!r} is {kind_of(turns)}, not a list")
        if turns or not {"instruction", "prompt"} & record.keys():
            return [parse_message(turn, number) for number, turn in enumerate(turns, 1)]
    if "instruction" in record:
        return _alpaca(record, unanswered)
    if "prompt" in record:
        question, answer = _side(record["prompt"], "user", 1), record.get("completion")
        return question if unanswered and not answer else [*question, *_side(answer, "assistant", 2)]
    keys = ", ".join(sorted(map(str, record))[:8]) or "none"
    raise Unusable(
        NO_CONVERSATION,
        f"no 'messages', 'conversations', 'instruction' + 'output', 'prompt' + 'completion' or 'text'; keys: {keys}",
    )


def _alpaca(record: Mapping[str, Any], unanswered: bool) -> list[Message]:
    turns = []
    history = record.get("history", ())
    for pair in history if isinstance(history, Sequence) else (history,):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise Unusable(UNSUPPORTED, "'history' is not a list of [question, answer]")
        turns += [Message("user", text_of(pair[0], 1)), Message("assistant", text_of(pair[1], 2))]
    question = text_of(record["instruction"], len(turns) + 1)
    extra = text_of(record.get("input") or "", len(turns) + 1)
    if extra.strip():
        question = f"{question}\n\n{extra}"
    turns.append(Message("user", question))
    answer = record.get("output")
    return turns if unanswered and not answer else [*turns, Message("assistant", text_of(answer, len(turns) + 1))]


def _side(value: Any, role: str, number: int) -> list[Message]:
    """One side of a prompt/completion record: a text, or messages."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [parse_message(turn, number + offset) for offset, turn in enumerate(value)]
    return [Message(role, text_of(value, number))]


def _tools(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = record.get("tools") or record.get("functions") or ()
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except (ValueError, RecursionError) as error:
        raise Unusable(UNSUPPORTED, "'tools' is not JSON") from error
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise Unusable(UNSUPPORTED, "'tools' is not a list of objects")
    return tuple(tools)


def _check(turns: Sequence[Message], start: int, unanswered: bool) -> None:
    if len(turns) < start + (1 if unanswered else 2):
        remedy = "" if unanswered or len(turns) == start else " (prepare --regenerate has the target answer)"
        raise Unusable(NO_CONVERSATION, f"no user turn{'' if unanswered else ' with an answer'}{remedy}")
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
    if turns[-1].role != "user" and not any(turn.trained for turn in turns if turn.role == "assistant"):
        raise Unusable(NO_LOSS, "every answer has the weight 0")
