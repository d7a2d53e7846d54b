"""Requests answers from a server with OpenAI's chat-completions protocol."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from aquiline.training.data.messages import EMPTY_TURN, parse_message
from aquiline.training.data.replies import Reply, ReplyRequest, ReplySampling
from aquiline.training.data.sources import Unusable

_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_ABOUT_THIS_REQUEST = frozenset({400, 413, 422})
_CUT = ("length", "max_tokens")
"""Reasons to finish that mean a cut; servers name the end of a turn in many ways, or not at all."""


class EndpointError(RuntimeError):
    """The server is unusable: unreachable after all tries, or it rejects every request."""


@dataclass(frozen=True)
class Endpoint:
    """A server and its request settings; a `Complete` for `regenerate`, one request per call.

    Run `regenerate` with a large `in_flight` (and `batch_size` 1) to keep many requests in flight;
    the server batches them.

    Attributes:
        url: base URL including the version, e.g. ``http://localhost:8000/v1``.
        model: the served model's name.
        api_key: sent as a bearer token if given.
        timeout: seconds to wait for one answer.
        tries: total attempts per request while errors are transient.
        patience: seconds before the second try; doubles for each later one, up to a minute.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    tries: int = 6
    patience: float = 1.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}; allowed: http:// or https://, e.g. http://localhost:8000/v1")
        if self.tries < 1:
            raise ValueError(f"tries is {self.tries}; allowed: 1 or more")

    def __call__(self, requests: Sequence[ReplyRequest], sampling: ReplySampling) -> list[Reply]:
        """Requests the answers one after another.

        Raises:
            EndpointError: if the server is unusable.
        """
        return [_ask(self, request, sampling) for request in requests]


def _ask(endpoint: Endpoint, request: ReplyRequest, sampling: ReplySampling) -> Reply:
    body = {
        "model": endpoint.model,
        "messages": [{"role": m.role, "content": m.content} for m in request.messages],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
        "seed": request.seed >> 32,  # some servers accept only 32-bit seeds
    }
    trouble = ""
    for attempt in range(endpoint.tries):
        if attempt:
            wait = min(60.0, endpoint.patience * 2 ** (attempt - 1))
            time.sleep(wait * random.uniform(0.5, 1.0))  # spreads the threads' retries
        try:
            return _reply(endpoint, _post(endpoint, body))
        except urllib.error.HTTPError as error:
            trouble = f"status {error.code}: {_said(error)}"
            if error.code in _ABOUT_THIS_REQUEST:
                return Reply("", refused=trouble)
            if error.code not in _PASSING:
                raise EndpointError(f"{endpoint.url} rejects requests: {trouble}") from error
        except (OSError, HTTPException) as error:
            trouble = f"{type(error).__name__}: {error}"
    raise EndpointError(
        f"{endpoint.url} gave no answer in {endpoint.tries} tries (last: {trouble}); run again when it is available: "
        "finished conversations are kept"
    )


def _post(endpoint: Endpoint, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    request = urllib.request.Request(endpoint.url.rstrip("/") + "/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=endpoint.timeout) as answer:
        raw = answer.read()
    try:
        return json.loads(raw)
    except ValueError as error:
        raise EndpointError(f"{endpoint.url} answered {raw[:80]!r}, which is not JSON") from error


def _reply(endpoint: Endpoint, answer: Any) -> Reply:
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        if not isinstance(message, Mapping):
            raise TypeError("message is not an object")
        finished = choice.get("finish_reason") not in _CUT
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EndpointError(
            f"{endpoint.url} answered without choices[0].message.content: {str(answer)[:200]}"
        ) from error
    try:
        said = parse_message({**message, "role": "assistant"}, 1)
    except Unusable as error:
        return Reply("", finished, None if error.reason == EMPTY_TURN else str(error))
    if said.tool_calls:
        return Reply("", finished, "the answer calls tools")
    return Reply(said.content, finished, reasoning=said.reasoning)


def _said(error: urllib.error.HTTPError) -> str:
    return " ".join(error.read(300).decode(errors="replace").split()) or str(error.reason)
