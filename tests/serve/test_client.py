"""`aquiline chat --url` against our own server, and against ones that misbehave."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from aquiline.engine.generate import generate_requests
from aquiline.engine.request import Request
from aquiline.engine.text import encode_prompt
from aquiline.sampling import SamplingParams
from aquiline.serve.client import RemoteChat
from tests.command_line import call
from tests.serve.serving import Running, path_model, serving
from tests.training.chat_server import ChatServer

SETTINGS = ("--max-new-tokens", 12, "--temperature", 0.8, "--seed", 3, "--top-p", 0.9)


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_conversation_equals_the_library(says: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = path_model()
    messages, wanted = [{"role": "system", "content": "Be brief."}], []
    for turn in ("hello", "and then?"):
        messages.append({"role": "user", "content": turn})
        tokens = encode_prompt(model.tokenizer, messages)
        params = SamplingParams(max_new_tokens=12, temperature=0.8, seed=3, top_p=0.9)
        (output,) = generate_requests(model.plain().engine, [Request(tokens, params)])
        wanted.append(output.text)
        messages.append({"role": "assistant", "content": output.text})
    with serving(model, api_key="secret") as running:
        words = ("chat", "--url", running.url, "--api-key", "secret", "--system", "Be brief.", *SETTINGS)
        says("hello\nand then?\n")
        records = [json.loads(line) for line in call(capsys, *words, "--json").out.splitlines()]
        assert [record["text"] for record in records] == wanted and records[0]["prompt"] == "hello"
        says("hello\n")
        assert call(capsys, *words).out == wanted[0] + "\n"
        says("hello\n")
        refused = call(capsys, "chat", "--url", running.url, "--api-key", "no")
        assert refused.code == 1 and "401" in refused.error and "Bearer" in refused.error
        says("hello\n")
        refused = call(capsys, *words, "--chat-template-kwargs", '{"mood": "glad"}')
        assert (
            refused.code == 1 and "400: chat_template_kwargs: the chat template has no setting 'mood'" in refused.error
        )


def test_options_of_the_other_kind_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, part in (
        (("--url", "http://127.0.0.1:1", "--tree", "static"), "--tree"),
        (("--url", "http://127.0.0.1:1", "--target", "other"), "--target"),
        (("--model", "x"), "--url"),
        (("--url", "ftp://x"), "http://"),
    ):
        result = call(capsys, "chat", *words)
        assert result.code == 2 and part in result.error
    gone = call(capsys, "chat", "--url", "http://127.0.0.1:1")
    assert gone.code == 1 and "aquiline serve" in gone.error


def test_a_closed_stream_keeps_its_text_and_frees_the_server(tmp_path: Any) -> None:
    def free(running: Running) -> bool:
        return running.scheduler.running == 0

    with serving(path_model(delay=0.01)) as running:
        chat = RemoteChat(f"{running.url}/v1/", settings={"max_tokens": 900, "ignore_eos": True})
        stream = chat.stream("a long one")
        first = next(stream)
        stream.close()
        assert chat.messages[0]["content"] == "a long one" and chat.messages[1]["content"].startswith(first)
        running.until(lambda: free(running))
        chat.settings = {"frobnicate": 1}
        with pytest.raises(RuntimeError, match=r"400.*frobnicate"):
            list(chat.stream("more"))
        assert len(chat.messages) == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, b"data: nonsense\n\n"), "not JSON"),
        ((200, b'data: {"error": {"message": "too hot"}}\n\n'), "too hot"),
        ((500, b"oops"), "500"),
        ((503, {"error": {"message": "loading"}}), r"503: loading"),
    ],
)
def test_servers_that_misbehave(answer: Any, message: str) -> None:
    with ChatServer(lambda _: answer).running() as other, pytest.raises(RuntimeError, match=message):
        list(RemoteChat(other.url, "any").stream("hello"))
