"""Chats with any server that speaks OpenAI's API."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

TIMEOUT = 600.0
"""Seconds without a word after which a server counts as gone."""


@dataclass(eq=False)
class RemoteChat:
    """A conversation that a server answers; the counterpart of `aquiline.engine.chat.ChatSession`.

    Args:
        url: the server's address, with or without its /v1.
        model: the model's name; None takes the first one that the server lists.
        api_key: sent as a bearer token if given.
        settings: sent with every request: temperature, max_tokens, …
        messages: the conversation so far; mutated.

    Raises:
        ValueError: for an address that is not HTTP.
        RuntimeError: if the server cannot be reached or refuses.
    """

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    settings: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"the server is {self.url!r}; allowed: http:// or https://, e.g. http://127.0.0.1:8000")
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("the API key has a line break or a character outside ASCII; copy it again")
        self.url = self.url.rstrip("/").removesuffix("/v1") + "/v1"
        if self.model is None:
            with closing(self._open("/models")) as answer:
                models = _parsed(answer.read()).get("data") or []
            if not models or not isinstance(models[0].get("id"), str):
                raise RuntimeError(f"{self.url} lists no model; name one with --model")
            self.model = models[0]["id"]

    def stream(self, message: str) -> Generator[str, None, None]:
        """Sends a message and yields the answer's pieces as they arrive.

        Both are kept in `messages` when the answer ends, or with the text so far if the generator
        is closed; without any text the turn is dropped.

        Raises:
            RuntimeError: if the server refuses, fails or goes away.
        """
        turn = {"role": "user", "content": message}
        body = self.settings | {"model": self.model, "messages": [*self.messages, turn], "stream": True}
        pieces: list[str] = []
        self.finish_reason = None
        try:
            with closing(self._open("/chat/completions", body)) as answer:
                for line in answer:
                    if not line.startswith(b"data: "):
                        continue
                    if line.strip() == b"data: [DONE]":
                        break
                    piece = self._piece(_parsed(line[6:]))
                    if piece:
                        pieces.append(piece)
                        yield piece
        except (OSError, HTTPException) as error:
            raise RuntimeError(f"{self.url} broke off ({error}); its text so far is kept") from error
        finally:
            if pieces:
                self.messages += [turn, {"role": "assistant", "content": "".join(pieces)}]

    def _piece(self, event: dict[str, Any]) -> str:
        if "error" in event:
            raise RuntimeError(f"{self.url}: {_message(event)}")
        choices = event.get("choices") or [{}]
        self.finish_reason = choices[0].get("finish_reason") or self.finish_reason
        return (choices[0].get("delta") or {}).get("content") or ""

    def _open(self, path: str, body: Any = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            return urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            try:
                said = _message(_parsed(error.read(4096)))
            except RuntimeError:
                said = error.reason
            raise RuntimeError(f"{self.url} answers {error.code}: {said}") from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise RuntimeError(f"{self.url} cannot be reached ({reason}); start it with `aquiline serve`") from error
        except ValueError as error:
            raise ValueError(
                f"the server {self.url!r} is not an address ({error}); allowed: ASCII and no spaces"
            ) from error


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except ValueError as error:
        raise RuntimeError(f"the server answered {raw[:80]!r}, which is not JSON") from error
    if not isinstance(found, dict):
        raise RuntimeError(f"the server answered {raw[:80]!r}; expected a JSON object")
    return found


def _message(event: dict[str, Any]) -> str:
    error = event.get("error")
    return " ".join(str(error.get("message") if isinstance(error, dict) else error).split())
