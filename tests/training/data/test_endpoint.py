"""Servers answer in many shapes; only a cut is a cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aquiline.training.data.conversations import Conversation, read_conversations
from aquiline.training.data.endpoint import Endpoint
from aquiline.training.data.messages import Message
from aquiline.training.data.regenerate import EMPTY_REPLY, REJECTED, regenerate
from aquiline.training.data.replies import Reply, ReplyRequest, ReplySampling
from tests.training.chat_server import ChatServer

QUESTION = ReplyRequest((Message("user", "Hi"),), 1)


def ask(message: Any, **choice: Any) -> Reply:
    answer = {"choices": [{"message": message, "finish_reason": "stop", **choice}]}
    with ChatServer(lambda _: (200, answer)).running() as server:
        [reply] = Endpoint(server.url, "any", tries=1)([QUESTION], ReplySampling())
    return reply


SHAPES: dict[str, tuple[dict[str, Any], Reply]] = {
    "text": ({"content": "Ho"}, Reply("Ho")),
    "another role": ({"role": "model", "content": "Ho"}, Reply("Ho")),
    "parts": (
        {"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Ho"}]},
        Reply("Ho", reasoning="Hm."),
    ),
    "reasoning_content": ({"content": "Ho", "reasoning_content": "Hm."}, Reply("Ho", reasoning="Hm.")),
    "reasoning": ({"content": "Ho", "reasoning": "Hm.", "tool_calls": []}, Reply("Ho", reasoning="Hm.")),
    "thoughts alone": ({"content": None, "reasoning_content": "Hm."}, Reply("", reasoning="Hm.")),
    "silence": ({"content": None}, Reply("")),
    "tools": (
        {"content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]},
        Reply("", refused="the answer calls tools"),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_an_answer_is_read(shape: str) -> None:
    message, reply = SHAPES[shape]
    assert ask(message) == reply


@pytest.mark.parametrize("reason", ["stop", "eos_token", "end_turn", "eos", None, "length", "max_tokens"])
def test_only_a_cut_is_unfinished(reason: str | None) -> None:
    assert ask({"content": "Ho"}, finish_reason=reason).finished == (reason not in ("length", "max_tokens"))


def test_a_part_that_is_not_text_is_a_refusal_of_this_request() -> None:
    assert "not text" in str(ask({"content": [{"type": "image_url"}]}).refused)


def test_thoughts_that_used_up_the_budget_are_kept(tmp_path: Path) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "?"}]
    source.write_text(json.dumps({"messages": turns}))
    message = {"content": None, "reasoning_content": "Hm"}
    answer = {"choices": [{"message": message, "finish_reason": "length"}]}
    with ChatServer(lambda _: (200, answer)).running() as server:
        report = regenerate(source, output, Endpoint(server.url, "any"))
    assert (report.written, report.unfinished) == (1, 1) and EMPTY_REPLY not in report.refused
    [item] = read_conversations(output)
    assert isinstance(item, Conversation) and not item.finished
    assert item.messages == (Message("user", "Hi"), Message("assistant", "", reasoning="Hm"))


def test_conversations_with_tools_are_not_regenerated(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "?"}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    (tmp_path / "in").write_text(json.dumps({"messages": turns, "tools": tools}))
    report = regenerate(tmp_path / "in", tmp_path / "out", lambda *_: [])
    assert report.refused == {"unsupported content": 1} and REJECTED not in report.refused
