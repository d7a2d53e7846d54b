"""Checks each request's host, origin, key and size; logs it, and answers errors in OpenAI's form."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from aquiline.checks import check_settings, check_value, setting
from aquiline.serve.fields import ApiError, Disconnected

logger = logging.getLogger("aquiline")

_OPEN = ("/", "/health")
"""Paths that need no key: the page holds no data, and probes have no key."""

_OTHER_ORIGIN = "web pages of another origin may not call this server; allow yours with --cors"

CLIENT_LEFT = 499
"""Status that nginx logs for a client that left before its answer began."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server; the meaning of each option is written once, here."""

    host: str = setting("127.0.0.1", "address to bind; the default is this machine alone")
    port: int = setting(8000, "port; 0 chooses a free one", allowed="0 … 65535", shown="8000")
    served_model_name: str = setting("model", "the model's name in requests", shown="--target")
    api_key: str | None = setting(None, "key that requests must carry", shown="AQUILINE_API_KEY, else none")
    cors: tuple[str, ...] = setting((), "web pages that may call the server, as https://host", unit="origins")
    max_queue: int = setting(64, "outputs that may wait for a row", allowed="≥ 0")
    timeout: float = setting(600.0, "longest time of a request", unit="seconds", allowed="> 0")
    max_body: int = 4 << 20  # bytes

    def __post_init__(self) -> None:
        check_settings(self)
        check_value("api_key", self.api_key, self.api_key != "", "a text that is not empty")
        for origin in self.cors:
            good = origin.startswith(("http://", "https://")) and origin.count("/") == 2
            check_value("cors", origin, good, "an origin such as https://example.org, without a path")


class Guard:
    """An ASGI application around another one.

    Args:
        app: answers what passes.
        refused: called with the status of every answer ≥ 400.
    """

    def __init__(self, app: Any, settings: ServerSettings, refused: Callable[[int], Any]) -> None:
        self.app, self.settings, self.refused = app, settings, refused

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

    # -- access ----------------------------------------------------------------------------------

    def _admit(self, scope: Any, headers: dict[str, str]) -> None:
        self._check_host(headers.get("host", ""))
        origin = headers.get("origin")
        if origin is not None and not self._own_page(origin, headers) and origin not in self.settings.cors:
            raise ApiError(403, _OTHER_ORIGIN)
        if self.settings.api_key is not None and scope["path"] not in _OPEN:
            sent = headers.get("authorization", "").removeprefix("Bearer ")
            # In constant time, so that timing does not reveal how much of a guess was right.
            if not hmac.compare_digest(sent.encode("utf-8", "replace"), self.settings.api_key.encode()):
                message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
                raise ApiError(401, message, "authentication_error", code="invalid_api_key")
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":  # a page of another origin cannot send JSON without a preflight
                raise ApiError(415, f"content-type is {kind[:100]!r}; allowed: application/json")

    def _check_host(self, host: str) -> None:
        """Rejects names of other machines: a malicious page can make its own name resolve to this one."""
        if self.settings.api_key is not None:
            return  # which such a page does not know
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            name = ""
        known = {"localhost", self.settings.host.lower()}
        if not _loopback(self.settings.host):
            known |= {socket.gethostname().lower()} | {urlsplit(origin).hostname or "" for origin in self.settings.cors}
        if name in known or _loopback(name) or (_address(name) and not _loopback(self.settings.host)):
            return
        raise ApiError(403, "the Host header does not name this server; use its address, or serve with --api-key")

    def _own_page(self, origin: str, headers: dict[str, str]) -> bool:
        return urlsplit(origin).netloc == headers.get("host") and origin.startswith(("http://", "https://"))

    # -- cross-origin requests -------------------------------------------------------------------

    def _cors(self, origin: str | None) -> list[tuple[bytes, bytes]]:
        if origin is None or origin not in self.settings.cors:
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"vary", b"Origin"),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
        ]

    async def _preflight(self, scope: Any, headers: dict[str, str], send: Any) -> bool:
        """Answers a browser's preflight request; False for any other."""
        if scope["method"] != "OPTIONS" or "access-control-request-method" not in headers:
            return False
        if headers.get("origin") not in self.settings.cors:
            raise ApiError(403, _OTHER_ORIGIN)
        allowed = [
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", b"authorization, content-type"),
            (b"access-control-max-age", b"600"),
        ]
        await send({"type": "http.response.start", "status": 204, "headers": allowed})
        await send({"type": "http.response.body", "body": b""})
        return True

    # -- size and log ----------------------------------------------------------------------------

    async def _limited(self, scope: Any, headers: dict[str, str], receive: Any) -> Any:
        """Reads the body before anything else, up to the limit; returns a `receive` that repeats it."""
        most, parts, size = self.settings.max_body, list[bytes](), 0
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
        counts = scope["aquiline"]() if "aquiline" in scope else {}
        line = {"request": name, "method": scope["method"], "path": scope["path"], "status": status}
        line |= {"ms": round(1000 * (time.perf_counter() - began), 1)}
        line |= {count: counts[count] for count in ("prompt_tokens", "completion_tokens") if count in counts}
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
