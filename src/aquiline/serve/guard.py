"""Before and after every request: who may ask, how much, what is logged, and errors in one shape."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

from aquiline.serve.fields import ApiError, Disconnected

logger = logging.getLogger("aquiline")

_OPEN = ("/", "/health")
"""Paths that need no key: the page holds nothing, and a probe has no key."""


CLIENT_LEFT = 499
"""What nginx logs for a client that left before its answer began."""


class Policy(Protocol):
    """The settings that decide who may ask; see `aquiline.serve.server.ServerSettings`."""

    @property
    def host(self) -> str: ...
    @property
    def api_key(self) -> str | None: ...
    @property
    def origins(self) -> tuple[str, ...]: ...
    @property
    def max_body(self) -> int: ...


class Guard:
    """An ASGI application around another one.

    Args:
        app: answers what passes.
        policy: the settings.
        refused: called with the status of every answer ≥ 400.
    """

    def __init__(self, app: Any, policy: Policy, refused: Callable[[int], Any]) -> None:
        self.app, self.policy, self.refused = app, policy, refused

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        began, name, status = time.perf_counter(), f"req-{secrets.token_hex(8)}", 0
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        own = [(b"x-request-id", name.encode()), (b"x-content-type-options", b"nosniff")]
        own += self._cors(headers.get("origin"))

        async def out(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = message | {"headers": [*message["headers"], *own]}
            await send(message)

        try:
            if not await self._preflight(scope, headers, out):
                self._admit(scope, headers)
                await self.app(scope, await self._limited(scope, headers, receive), out)
        except ApiError as error:
            await _say(error, out)
        except Disconnected:
            status = CLIENT_LEFT
        except Exception:
            if status:
                raise  # the answer has begun: uvicorn closes the connection
            logger.exception("request %s failed", name)
            await _say(ApiError(500, f"the server failed; its log has request {name}", "server_error"), out)
        finally:
            if status >= 400:
                self.refused(status)
            self._log(scope, name, status, began)

    # -- who may ask -----------------------------------------------------------------------------

    def _admit(self, scope: Any, headers: dict[str, str]) -> None:
        self._check_host(headers.get("host", ""))
        origin = headers.get("origin")
        if origin is not None and not self._own_page(origin, headers) and origin not in self.policy.origins:
            raise ApiError(403, "web pages of another origin may not call this server; allow yours with --cors")
        if self.policy.api_key is not None and scope["path"] not in _OPEN:
            sent = headers.get("authorization", "").removeprefix("Bearer ")
            # In constant time: how long it takes must not tell how much of a guess was right.
            if not hmac.compare_digest(sent.encode("utf-8", "replace"), self.policy.api_key.encode()):
                message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
                raise ApiError(401, message, "authentication_error", code="invalid_api_key")
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":  # what a page may send without asking first is never JSON
                raise ApiError(415, f"content-type is {kind[:100]!r}; allowed: application/json")

    def _check_host(self, host: str) -> None:
        """Refuses names that do not mean this machine: a page may have its own name point here."""
        if self.policy.api_key is not None:
            return  # such a page cannot know the key
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            name = ""
        known = {"localhost", self.policy.host.lower()}
        if not _loopback(self.policy.host):
            known |= {socket.gethostname().lower()} | {
                urlsplit(origin).hostname or "" for origin in self.policy.origins
            }
        if name in known or _loopback(name) or (_address(name) and not _loopback(self.policy.host)):
            return
        raise ApiError(403, "the Host header does not name this server; use its address, or serve with --api-key")

    def _own_page(self, origin: str, headers: dict[str, str]) -> bool:
        return urlsplit(origin).netloc == headers.get("host") and origin.startswith(("http://", "https://"))

    # -- web pages elsewhere ---------------------------------------------------------------------

    def _cors(self, origin: str | None) -> list[tuple[bytes, bytes]]:
        if origin is None or origin not in self.policy.origins:
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"vary", b"Origin"),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
        ]

    async def _preflight(self, scope: Any, headers: dict[str, str], send: Any) -> bool:
        """Answers a browser that asks whether it may ask."""
        if scope["method"] != "OPTIONS" or "access-control-request-method" not in headers:
            return False
        if headers.get("origin") not in self.policy.origins:
            raise ApiError(403, "web pages of another origin may not call this server; allow yours with --cors")
        allowed = [
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", b"authorization, content-type"),
            (b"access-control-max-age", b"600"),
        ]
        await send({"type": "http.response.start", "status": 204, "headers": allowed})
        await send({"type": "http.response.body", "body": b""})
        return True

    # -- how much --------------------------------------------------------------------------------

    async def _limited(self, scope: Any, headers: dict[str, str], receive: Any) -> Any:
        """Reads the body before anything else, up to the limit; returns a `receive` that repeats it."""
        most, parts, size = self.policy.max_body, list[bytes](), 0
        claimed = headers.get("content-length", "0")
        too_large = ApiError(413, f"the body is larger than {most} bytes; send less", code="request_too_large")
        if claimed.isdigit() and int(claimed) > most:
            raise too_large
        more = scope["method"] == "POST"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise too_large
            more = message.get("more_body", False)
        body = [b"".join(parts)]

        async def replay() -> Any:
            return {"type": "http.request", "body": body.pop(), "more_body": False} if body else await receive()

        return replay

    def _log(self, scope: Any, name: str, status: int, began: float) -> None:
        """One JSON line; it never holds a prompt or an answer."""
        usage = scope.get("aquiline")
        line = {"request": name, "method": scope["method"], "path": scope["path"], "status": status}
        line |= {"ms": round(1000 * (time.perf_counter() - began), 1)} | (usage() if usage else {})
        logger.info("%s", json.dumps(line))


async def _say(error: ApiError, send: Any) -> None:
    body = json.dumps(error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _loopback(name: str) -> bool:
    return name == "localhost" or (_address(name) and ipaddress.ip_address(name).is_loopback)
