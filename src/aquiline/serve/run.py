"""Starts the server: binds, loads the model, announces itself, drains at SIGTERM."""

from __future__ import annotations

import logging
import math
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from aquiline.loading import Loaded
from aquiline.serve.guard import ServerSettings
from aquiline.serve.server import Accompany, Server

logger = logging.getLogger("aquiline")


def run_server(
    settings: ServerSettings,
    load: Callable[[], Loaded],
    ready: Callable[[str, Loaded], None],
    accompany: Accompany | None = None,
) -> None:
    """Serves until SIGTERM or Ctrl-C, then finishes the running requests; a second signal ends them.

    Args:
        load: loads the model, in another thread; until then the server answers 503.
        ready: called with the server's URL and the model as soon as requests are served.

    Raises:
        OSError: if the address cannot be bound.
    """
    listener = bind(settings)
    url = _url(settings.host, listener)
    server, failed = Server(settings, accompany=accompany), list[Exception]()
    http = http_server(server)

    def begin() -> None:
        try:
            loaded = load()
            server.ready(loaded)
            ready(url, loaded)
        except Exception as error:  # noqa: BLE001 - raised below, in the main thread
            failed.append(error)
            http.should_exit = True

    threading.Thread(target=begin, name="aquiline-loader", daemon=True).start()
    try:
        http.run(sockets=[listener])
    finally:
        listener.close()
        server.close()
    if failed:
        raise failed[0]


def _url(host: str, listener: socket.socket) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def bind(settings: ServerSettings) -> socket.socket:
    """Returns a listening socket.

    Raises:
        OSError: if the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=256)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        reason = (error.strerror or str(error)).partition(" (while")[0]  # Python appends the address
        raise OSError(f"{where} cannot be bound ({reason}); choose another --port or --host") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted connections inherit it
        # Else the answer to a client that stops reading would stay in memory until the client ends.
        milliseconds = min(math.ceil(1000 * settings.timeout), (1 << 31) - 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return listener


def http_server(server: Server) -> uvicorn.Server:
    """Returns what speaks HTTP for `server`; it runs on a socket of `bind`."""
    return _Http(
        uvicorn.Config(
            server.app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=math.ceil(server.settings.timeout),  # a client may send its body for ever
        )
    )


class _Http(uvicorn.Server):
    """A uvicorn that treats a second signal of any kind as the end, and does not raise them afterwards."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            return
        logger.info("finishing the running requests; a second signal ends them")
        self.should_exit = True
