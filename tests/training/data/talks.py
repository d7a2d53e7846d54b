"""Conversations as records of several formats."""

from __future__ import annotations

import json
from typing import Any

from aquiline.training.data.conversations import (
    Conversation,
    Refusal,
)

TALKS = [
    [("user", "Name a red fruit."), ("assistant", "A cherry, for one.")],
    [
        ("system", "Answer like a sailor."),
        ("user", "How deep is the harbour?"),
        ("assistant", "Four fathoms at low water, mate.\nMind the rocks!"),
        ("user", "And the tide?"),
        ("assistant", "Comes in at six. 🌊"),
    ],
    [("user", "Sum 2 and 3 in Python"), ("assistant", "```python\nprint(2 + 3)\n```")],
]


def as_messages(talk: list[tuple[str, str]]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in talk]}


def as_sharegpt(talk: list[tuple[str, str]]) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": names[role], "value": text} for role, text in talk]
    return {"id": "x_0", "conversations": turns}


def contents(items: list[Conversation | Refusal]) -> list[list[tuple[str, str]]]:
    return [[(m.role, m.content) for m in item.messages] for item in items if isinstance(item, Conversation)]


def refusals(items: list[Conversation | Refusal]) -> list[tuple[int, str]]:
    return [(item.index, item.reason) for item in items if isinstance(item, Refusal)]


def lines(records: list[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def turns(*names: str) -> dict[str, Any]:
    return {"messages": [{"role": name, "content": f"{name} speaks"} for name in names]}
