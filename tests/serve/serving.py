"""A server on a port of this machine, over targets that need no weights or tiny ones."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from aquiline.drafters.drafter import Drafter
from aquiline.engine.request import Engine
from aquiline.loading import Loaded
from aquiline.sampling import SamplingParams
from aquiline.serve.guard import ServerSettings
from aquiline.serve.run import bind, http_server
from aquiline.serve.scheduler import Scheduler
from aquiline.serve.server import Accompany, Server
from tests.knowing_drafter import KnowingDrafter
from tests.path_target import PathTarget
from tests.tiny_tokenizers import every_byte

MODEL = "tiny"


def path_model(context: int = 1024, rows: int = 4, drafting: bool = True, delay: float = 0.0) -> Loaded:
    """A model whose text depends on every token before it; its drafter knows about three of four.

    Args:
        context: its context.
        rows: rows that decode together.
        drafting: with a drafter.
        delay: seconds that a forward takes at least.
    """
    vocabulary = len(every_byte())

    class Slow(PathTarget):
        def forward(self, *args: Any) -> Any:
            time.sleep(delay)
            return super().forward(*args)

    target = Slow(vocabulary, context)

    def known(prefix: Sequence[int]) -> list[int]:
        text = list(prefix)
        for _ in range(4):
            text.append(int(target.logits(text).argmax()))
        return text[len(prefix) :]

    drafter = KnowingDrafter(known, vocabulary) if drafting else None
    return loaded(target, drafter, rows)


def loaded(target: Any, drafter: Drafter | None, rows: int = 4) -> Loaded:
    """A model of these parts, with a tokenizer that encodes every text."""
    engine = Engine(target, drafter, every_byte(), (0,), max_rows=rows)
    return Loaded(engine, None, "knowing" if drafter else "plain", SamplingParams())


@dataclass(frozen=True, eq=False)
class Running:
    """A server that runs."""

    port: int
    server: Server
    http: uvicorn.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def scheduler(self) -> Scheduler:
        assert self.server.scheduler is not None
        return self.server.scheduler

    def ask(
        self, path: str, body: Any = None, *, method: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        """One request; returns status, headers and the answer, parsed if it is JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method or ("GET" if body is None else "POST"), path, raw, sent)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, found, json.loads(text) if "json" in found.get("content-type", "") else text.decode()

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream; the last one is "[DONE]"."""
        status, headers, text = self.ask(path, body | {"stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
        lines = text.split("\n\n")
        assert lines.pop() == "" and all(line.startswith("data: ") for line in lines)
        return [line[6:] if line[6:] == "[DONE]" else json.loads(line[6:]) for line in lines]

    def until(self, condition: Any, seconds: float = 20.0) -> None:
        """Waits for a condition."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not come about in time"
            time.sleep(0.005)


@contextmanager
def serving(model: Loaded | None, accompany: Accompany | None = None, **settings: Any) -> Iterator[Running]:
    """Serves a model while the block runs; None: it is still loading."""
    server = Server(ServerSettings(**({"port": 0, "served_model_name": MODEL} | settings)), accompany=accompany)
    listener, made = bind(server.settings), http_server(server)
    if model is not None:
        server.ready(model)
    thread = threading.Thread(target=made.run, args=([listener],), daemon=True)
    thread.start()
    while not made.started:
        time.sleep(0.005)
    try:
        yield Running(listener.getsockname()[1], server, made)
    finally:
        made.should_exit = made.force_exit = True
        thread.join()
        server.close()


def user(text: str) -> list[dict[str, str]]:
    """A conversation of one turn."""
    return [{"role": "user", "content": text}]
