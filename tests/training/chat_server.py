"""A small server with OpenAI's chat-completions protocol, and a client process to kill.

Run as a program: ``python -m tests.training.chat_server SOURCE OUTPUT URL`` regenerates.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aquiline.training.data.endpoint import Endpoint
from aquiline.training.data.regenerate import regenerate

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class ChatServer:
    """Answers with ``answer(request body) -> (status, body)`` and keeps every request."""

    def __init__(self, answer: Answer) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                sent = self.rfile.read(length)
                if len(sent) < length:
                    return  # the client was killed while it asked
                body = json.loads(sent)
                server.bodies.append(body)
                server.headers.append({"path": self.path, **dict(self.headers)})
                status, said = answer(body)
                raw = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None:
                pass

            def handle(self) -> None:
                with suppress(ConnectionError):  # the client was killed
                    super().handle()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @contextmanager
    def running(self) -> Iterator[ChatServer]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def says(text: str, finish_reason: str = "stop") -> tuple[int, Any]:
    """A successful answer."""
    message = {"role": "assistant", "content": text}
    return 200, {"choices": [{"message": message, "finish_reason": finish_reason}]}


if __name__ == "__main__":
    source, output, url = sys.argv[1:]
    regenerate(source, output, Endpoint(url, "any"), in_flight=4)
