"""Every field of a record is used, counted, or a reason to refuse the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aquiline.training.data.conversations import (
    LEADING_DROPPED,
    NO_LOSS,
    ROLES,
    TRAILING_DROPPED,
    Conversation,
    Refusal,
    read_conversations,
)
from aquiline.training.data.messages import EMPTY_TURN, NO_CONVERSATION, UNSUPPORTED, Message
from tests.training.data.talks import TALKS, as_messages, contents, lines, turns


def read(record: Any, folder: Path) -> Conversation | Refusal:
    (folder / "talks.jsonl").write_text(json.dumps(record) + "\n")
    [item] = read_conversations(folder / "talks.jsonl")
    return item


def user(text: str = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "Ho", **fields}


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
STORED = '[{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}, "id": "c1"}]'

USED: dict[str, tuple[Any, list[Message]]] = {
    "reasoning_content": (
        {"messages": [user(), answer(reasoning_content="Hm.")]},
        [Message("user", "Hi"), Message("assistant", "Ho", "Hm.")],
    ),
    "two names of one reasoning": (
        {"messages": [user(), answer(reasoning="Hm.", thinking="Hm.")]},
        [Message("user", "Hi"), Message("assistant", "Ho", "Hm.")],
    ),
    "a part with thinking": (
        {
            "messages": [
                user(),
                answer(content=[{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Ho"}]),
            ]
        },
        [Message("user", "Hi"), Message("assistant", "Ho", "Hm.")],
    ),
    "weights": (
        {"messages": [user(), answer(weight=0), user(), answer(train=False), user(), answer(weight=1.0, train=True)]},
        [
            *[Message("user", "Hi"), Message("assistant", "Ho", trained=False)] * 2,
            *[Message("user", "Hi"), Message("assistant", "Ho")],
        ],
    ),
    "nulls of Parquet": (
        {
            "messages": [],
            "text": None,
            "conversations": [
                {"role": None, "from": "human", "content": None, "value": "Hi", "weight": None},
                {"role": None, "from": "gpt", "content": None, "value": "Ho", "tool_calls": None},
            ],
        },
        [Message("user", "Hi"), Message("assistant", "Ho")],
    ),
    "Alpaca with a history and a system prompt": (
        {"instruction": "Hi", "output": "Ho", "history": [["One", "Two"]], "system_prompt": "Be brief."},
        [
            *[Message("system", "Be brief."), Message("user", "One"), Message("assistant", "Two")],
            *[Message("user", "Hi"), Message("assistant", "Ho")],
        ],
    ),
    "prompt and completion": (
        {"prompt": "Hi", "completion": "Ho"},
        [Message("user", "Hi"), Message("assistant", "Ho")],
    ),
    "prompt and completion of messages": (
        {"prompt": [user()], "completion": [answer()]},
        [Message("user", "Hi"), Message("assistant", "Ho")],
    ),
    "a list alone": ([user(), answer()], [Message("user", "Hi"), Message("assistant", "Ho")]),
    "tool calls": (
        {
            "messages": [
                *[user(), {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}, answer()],
            ]
        },
        [
            *[Message("user", "Hi"), Message("assistant", "", tool_calls=STORED), Message("tool", "2")],
            Message("assistant", "Ho"),
        ],
    ),
}


@pytest.mark.parametrize("case", USED)
def test_fields_of_a_record_are_used(case: str, tmp_path: Path) -> None:
    record, messages = USED[case]
    item = read(record, tmp_path)
    assert isinstance(item, Conversation), item
    assert list(item.messages) == messages


def test_tools_and_settings_of_a_record_are_used(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    record = {"messages": [user(), answer()], "chat_template_kwargs": {"enable_thinking": False}}
    for tools in ([tool], json.dumps([tool])):
        item = read(record | {"tools": tools}, tmp_path)
        assert isinstance(item, Conversation)
        assert item.tools == (tool,) and item.chat_template_kwargs == {"enable_thinking": False}


def test_columns_that_parquet_filled_with_nulls(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}],
            "conversations": None,
        },
        {"messages": [], "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows")
    expected = (Message("user", "Hi"), Message("assistant", "Ho"))
    assert [getattr(item, "messages", item) for item in read_conversations(tmp_path / "rows")] == [expected] * 2


def test_a_dataclass_is_rendered_with_its_fields() -> None:
    turn = Message("assistant", "Ho", "Hm.", STORED).as_dict()
    assert turn["reasoning_content"] == "Hm." and turn["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert Message("user", "Hi").as_dict() == {"role": "user", "content": "Hi"}


COUNTED: dict[str, tuple[Any, str, str]] = {
    "half a weight": ({"messages": [user(), answer(weight=0.5)]}, UNSUPPORTED, "weight 0.5; allowed: 0"),
    "nothing weighs": ({"messages": [user(), answer(weight=0)]}, NO_LOSS, "weight 0"),
    "tools that are not JSON": ({"messages": [user(), answer()], "tools": "{"}, UNSUPPORTED, "'tools'"),
    "settings of another kind": (
        {"messages": [user(), answer()], "chat_template_kwargs": "x"},
        UNSUPPORTED,
        "'chat_template_kwargs' is str",
    ),
    "reasoning of another kind": ({"messages": [user(), answer(reasoning={"a": 1})]}, UNSUPPORTED, "not text"),
    "a user who calls tools": ({"messages": [{**user(), "tool_calls": [CALL]}, answer()]}, UNSUPPORTED, "turn 1"),
    "a call without an answer": (
        {"messages": [user(), {"role": "assistant", "tool_calls": [CALL]}, user(), answer()]},
        ROLES,
        "turn 3 is user, expected tool",
    ),
    "a tool's answer at the end": (
        {"messages": [user(), {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]},
        ROLES,
        "turn 3 is tool",
    ),
    "history that is a number": ({"instruction": "Hi", "output": "Ho", "history": 5}, UNSUPPORTED, "'history' is not"),
    "system of another kind": ({"messages": [user(), answer()], "system": 5}, UNSUPPORTED, "turn 0's content is int"),
    "finished of another kind": ({"messages": [user(), answer()], "finished": "no"}, UNSUPPORTED, "'finished' is 'no'"),
    "history of another kind": (
        {"instruction": "Hi", "output": "Ho", "history": ["One"]},
        UNSUPPORTED,
        "'history' is not a list",
    ),
}


@pytest.mark.parametrize("case", COUNTED)
def test_other_records_are_refused_with_the_field(case: str, tmp_path: Path) -> None:
    record, reason, words = COUNTED[case]
    item = read(record, tmp_path)
    assert isinstance(item, Refusal) and item.reason == reason and words in item.detail, item


def test_alpaca_records(tmp_path: Path) -> None:
    records = [
        {"instruction": "Translate to French.", "input": "Good day", "output": "Bonjour"},
        {"instruction": "Name a colour.", "input": "", "output": "Blue", "system": "Be brief."},
    ]
    (tmp_path / "alpaca.json").write_text(json.dumps(records))
    assert contents(list(read_conversations(tmp_path / "alpaca.json"))) == [
        [("user", "Translate to French.\n\nGood day"), ("assistant", "Bonjour")],
        [("system", "Be brief."), ("user", "Name a colour."), ("assistant", "Blue")],
    ]


UNUSABLE: list[tuple[Any, str, str]] = [
    (turns("user", "user", "assistant"), ROLES, "turn 2 is user, expected assistant"),
    (turns("user", "assistant", "assistant"), ROLES, "turn 3 is assistant, expected user"),
    (turns("user", "system", "assistant"), ROLES, "turn 2 is system"),
    (turns("user", "assistant", "system"), ROLES, "turn 3 is system"),
    (turns("system", "assistant"), NO_CONVERSATION, "no user turn with an answer"),
    (turns("user"), NO_CONVERSATION, "no user turn with an answer (prepare --regenerate"),
    (turns(), NO_CONVERSATION, "no user turn"),
    (turns("user", "oracle"), UNSUPPORTED, "'oracle'; allowed: assistant"),
    ({"messages": "hello"}, NO_CONVERSATION, "'messages' is str, not a list"),
    ({"messages": ["hello"]}, NO_CONVERSATION, "turn 1 is str"),
    ({"chosen": "hello"}, NO_CONVERSATION, "keys: chosen"),
    ({}, NO_CONVERSATION, "keys: none"),
    ([1], NO_CONVERSATION, "the record is list"),
    (None, NO_CONVERSATION, "the record is null"),
    ({"instruction": "x", "output": " \n"}, EMPTY_TURN, "turn 2 (assistant) is empty"),
    ({"instruction": "x", "output": None}, EMPTY_TURN, "turn 2 has no content"),
    ({"instruction": "x", "output": 3}, UNSUPPORTED, "turn 2's content is int"),
    ({"instruction": "x", "output": "\ud83d"}, "invalid Unicode", "turn 2 holds half"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        UNSUPPORTED,
        "parts that are not text",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        UNSUPPORTED,
        "turn 1 calls tools",
    ),
]


@pytest.mark.parametrize(("record", "reason", "words"), UNUSABLE)
def test_unusable_records_are_named(record: Any, reason: str, words: str, tmp_path: Path) -> None:
    good = as_messages(TALKS[0])
    (tmp_path / "talks.jsonl").write_text(lines([good, record, good]))
    first, refusal, last = read_conversations(tmp_path / "talks.jsonl")
    assert isinstance(first, Conversation) and isinstance(last, Conversation)
    assert isinstance(refusal, Refusal)
    assert (refusal.index, refusal.reason) == (2, reason)
    assert words in refusal.detail
    assert str(refusal).startswith("talks.jsonl, record 2: ")


def test_half_exchanges_at_the_ends_are_dropped_and_said(tmp_path: Path) -> None:
    (tmp_path / "talks").write_text(
        lines([turns("assistant", "user", "assistant"), turns("system", "user", "assistant", "user")])
    )
    first, second = read_conversations(tmp_path / "talks")
    assert isinstance(first, Conversation) and isinstance(second, Conversation)
    assert [m.role for m in first.messages] == ["user", "assistant"]
    assert first.adjusted == (LEADING_DROPPED,)
    assert [m.role for m in second.messages] == ["system", "user", "assistant"]
    assert second.adjusted == (TRAILING_DROPPED,)
