"""`aquiline serve` as a process: its ready line, its signals, and a restart after the worst."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aquiline.loading import load
from tests.command_line import call, write_target
from tests.prompts import PROMPTS
from tests.serve.serving import serving, user

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("served") / "little")


@contextmanager
def process(target: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """A server that is ready, its port, and its ready line."""
    command = [sys.executable, "-m", "aquiline.cli", "serve", "--target", str(target), "--port", "0", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, cwd=target.parent
    )
    assert started.stdout is not None
    try:
        line = started.stdout.readline()
        assert line.startswith("ready: http://127.0.0.1:"), line
        yield started, int(line.split(":")[3].split()[0]), line
    finally:
        started.kill()
        started.wait()


def ask(port: int, count: int, **more: Any) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"messages": user("Hello"), "max_tokens": count, "ignore_eos": True, "temperature": 0} | more
    connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer if more.get("stream") else json.loads(answer.read())


def test_sigterm_finishes_running_requests_and_a_second_one_ends_them(target: Path) -> None:
    with process(target, "--draft", "prompt-lookup") as (server, port, line):
        assert "model little, drafting: prompt lookup" in line and str(target.parent) not in line
        found: list[Any] = []
        client = threading.Thread(target=lambda: found.append(ask(port, 150)))
        _, stream = ask(port, 150, stream=True)  # its first event tells that the server is at work
        assert stream.readline().startswith(b"data: ")
        client.start()
        while b"\n" not in stream.readline():
            pass
        server.send_signal(signal.SIGTERM)
        rest = stream.read()
        assert rest.endswith(b"data: [DONE]\n\n"), "it is finished, not cut off"
        client.join()
        assert server.wait(60) == 0
        with pytest.raises(ConnectionRefusedError):
            ask(port, 1)
    with process(target, "--draft", "none") as (server, port, _):
        _, stream = ask(port, 450, stream=True)
        stream.readline()
        server.send_signal(signal.SIGTERM)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def test_a_kill_loses_only_running_requests(target: Path) -> None:
    with process(target) as (server, port, _):
        before = ask(port, 20)[1]["choices"]
        _, stream = ask(port, 450, stream=True)
        stream.readline()
        server.kill()
        server.wait()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            stream.read()
    with process(target, "--port", str(port)) as (_, again, _):
        assert again == port and ask(port, 20)[1]["choices"] == before


def test_targets_that_cannot_be_served(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = call(capsys, "serve", "--target", target, "--port", port)
        assert result.code == 1 and f"127.0.0.1:{port}" in result.error and "--port" in result.error
        assert "(Address already in use)" in result.error
    result = call(capsys, "serve", "--target", target / "nothing", "--port", 0)
    assert result.code == 2 and "nothing" in result.error


@pytest.mark.real
def test_eight_clients_of_the_real_model_get_the_outputs_of_generate(smollm2_folder: Path) -> None:
    """With the shipped head: greedy and seeded, all at once, and asked twice.

    In float32: a prompt whose beginning is reused is read in a forward of another width, and the bfloat16
    kernels round by the width where two tokens are nearly tied.
    """
    loaded = load(smollm2_folder, dtype="float32", max_rows=4)
    settings = [{"temperature": 0} if i % 2 else {"temperature": 0.7, "seed": i} for i in range(8)]
    prompts = PROMPTS[:8]
    wanted = [
        loaded.plain().generate(user(prompt), max_new_tokens=16, **more).text
        for prompt, more in zip(prompts, settings, strict=True)
    ]
    found: dict[int, list[str]] = {}
    with serving(loaded) as running:

        def work(i: int) -> None:
            body = {"messages": user(prompts[i]), "max_tokens": 16} | settings[i]
            answers = [running.ask(CHAT, body)[2] for _ in range(2)]
            found[i] = [answer["choices"][0]["message"]["content"] for answer in answers]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {i: [text] * 2 for i, text in enumerate(wanted)}
