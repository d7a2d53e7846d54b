"""Limits and security: keys, sizes, queues, other origins, and what errors and logs reveal."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest

from aquiline.loading import Loaded
from tests.serve.serving import Running, path_model, serving, user

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def test_still_loading() -> None:
    with serving(None) as loading:
        for path, body in (("/health", None), (CHAT, {"messages": user("x")}), ("/v1/models", None)):
            status, headers, _ = loading.ask(path, body)
            assert status == 503 and headers["retry-after"]


def test_the_key(model: Loaded) -> None:
    with serving(model, api_key="secret") as locked:
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer secret2"}):
            status, headers, answer = locked.ask(TEXT, {"prompt": "x"}, **header)
            assert status == 401 and headers["www-authenticate"] == "Bearer" and "secret" not in str(answer)
        assert locked.ask(TEXT, {"prompt": "x"}, Authorization="Bearer secret")[0] == 200
        assert locked.ask("/metrics")[0] == 401 and locked.ask("/health")[0] == locked.ask("/")[0] == 200


def test_a_large_body(model: Loaded) -> None:
    with serving(model, max_body=1000) as small:
        status, _, answer = small.ask(TEXT, {"prompt": "x" * 2000})
        assert status == 413 and "1000" in answer["error"]["message"]
        with socket.create_connection(("127.0.0.1", small.port)) as chunked:  # no Content-Length to go by
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            chunked.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + b"400\r\n" + b"x" * 1024 + b"\r\n")
            assert b" 413 " in chunked.recv(100)


def test_a_full_queue_says_when_to_come_back() -> None:
    with serving(path_model(rows=1, delay=0.01), max_queue=1) as narrow:
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
        threads = [threading.Thread(target=narrow.ask, args=(TEXT, body)) for _ in range(2)]
        for thread in threads:
            thread.start()
        narrow.until(lambda: narrow.scheduler.running + narrow.scheduler.waiting == 2)
        status, headers, answer = narrow.ask(TEXT, {"prompt": "y"})
        assert status == 429 and int(headers["retry-after"]) >= 1 and answer["error"]["code"] == "queue_full"
        assert narrow.ask(TEXT, {"prompt": "y", "n": 3})[0] == 400, "more than there will ever be room for"
        for thread in threads:
            thread.join()
        assert narrow.ask(TEXT, {"prompt": "y"})[0] == 200


def test_a_deadline() -> None:
    body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
    with serving(path_model(delay=0.01), timeout=0.3) as hurried:
        assert hurried.ask(TEXT, body)[0] == 504
        events = hurried.events(TEXT, body)
        assert events[-2]["error"]["type"] == "timeout_error" and events[-1] == "[DONE]"
        hurried.until(lambda: hurried.scheduler.running == 0)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="needs Linux")
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_stops_reading_holds_neither_a_slot_nor_its_answer(
    stream: bool,
) -> None:
    """A megabyte of log-probabilities, more than the buffers of a connection."""
    prompt = {"prompt": "x", "max_tokens": 150, "n": 4, "ignore_eos": True, "logprobs": 20}
    sent = json.dumps(prompt | {"stream": stream}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}"
    with serving(path_model(), timeout=2.0) as running, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", running.port))
        deaf.sendall(head.encode() + b"\r\n\r\n" + sent)
        running.until(lambda: running.scheduler.metrics.success.labels("tiny", "length")._value.get() == 4)
        assert running.scheduler.running == 0 and running.ask(TEXT, {"prompt": "y"})[0] == 200
        assert running.http.server_state.connections
        running.until(lambda: not running.http.server_state.connections)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),  # a name that its owner points here
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content_Type": "text/plain"}, 415),  # a page may send that without asking
        ({"Host": "localhost:1234"}, 200),
        ({"Host": "[::1]"}, 200),
        ({"Origin": "https://good.example"}, 200),
    ],
)
def test_web_pages_elsewhere_cannot_drive_it(model: Loaded, headers: dict[str, str], status: int) -> None:
    with serving(model, cors=("https://good.example",)) as guarded:
        found, sent, _ = guarded.ask(TEXT, {"prompt": "x"}, **headers)
        assert found == status
        allowed = headers.get("Origin") if status == 200 else None
        assert sent.get("access-control-allow-origin") == allowed
        asked = guarded.ask(
            TEXT, method="OPTIONS", Origin=headers.get("Origin", ""), Access_Control_Request_Method="POST"
        )
        assert asked[0] == (204 if allowed else 403)


@pytest.mark.parametrize(
    ("host", "key", "status"),
    [("10.1.2.3:8000", None, 200), ("evil.example", None, 403), ("evil.example", "secret", 200), ("", None, 403)],
)
def test_a_server_for_other_machines(model: Loaded, host: str, key: str | None, status: int) -> None:
    """Addresses are safe: a page elsewhere has a name. So is a key, which such a page cannot know."""
    with serving(model, host="0.0.0.0", api_key=key) as public:
        assert public.ask(TEXT, {"prompt": "x"}, Host=host, Authorization=f"Bearer {key}")[0] == status


def test_errors_and_logs_name_no_path_and_no_prompt(
    server: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("in /home/somebody/file.py")

    with monkeypatch.context() as patch, caplog.at_level("INFO", "aquiline"):
        patch.setattr("aquiline.serve.server.outputs_of", broken)
        status, headers, answer = server.ask(TEXT, {"prompt": "a very private question"})
        name = headers["x-request-id"]
        server.until(lambda: f'{{"request": "{name}"' in caplog.text)  # the log comes after the answer
    assert status == 500 and "/home" not in str(answer) and headers["x-request-id"] in str(answer)
    assert "private" not in caplog.text
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith(f'{{"request": "{name}"')]
    record = json.loads(line)
    assert record["status"] == 500 and record["path"] == TEXT
