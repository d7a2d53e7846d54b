"""The HTTP server: OpenAI's endpoints over the scheduler."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from aquiline.engine.batch import out_of_memory
from aquiline.engine.emission import Emission, outputs_of
from aquiline.engine.request import GenerationOutput, StreamEvent
from aquiline.engine.text import encode_prompt, tokenized
from aquiline.loading import Loaded
from aquiline.serve.answers import Answer, Deliveries, EventStream
from aquiline.serve.asked import Asked, read_chat, read_completion
from aquiline.serve.fields import ApiError, Disconnected, Fields, flag, parse_json, text, token_ids
from aquiline.serve.guard import Guard, ServerSettings
from aquiline.serve.scheduler import Busy, Delivery, Job, PromptScores, Scheduler

logger = logging.getLogger("aquiline")


@dataclass(frozen=True, eq=False)
class Companion:
    """Works beside a server: keeps outputs whose requests allow it, and fills the field `renewal` of /health."""

    keep: Callable[[GenerationOutput], None]
    health: Callable[[], Mapping[str, Any]]
    stop: Callable[[], None]


Accompany = Callable[[Loaded, Callable[[], bool]], Companion]  # the second argument: whether requests run or wait


@dataclass(eq=False)
class Server:
    """The endpoints and their shared state.

    Attributes:
        loaded: the model, or None while it loads.
        scheduler: the worker, or None while the model loads.
        created: seconds since the epoch, in /v1/models.
        accompany: makes the companion, if there is one.
    """

    settings: ServerSettings
    loaded: Loaded | None = None
    scheduler: Scheduler | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    accompany: Accompany | None = None
    _companion: Companion | None = None

    def ready(self, loaded: Loaded) -> None:
        """Starts serving a model."""
        if loaded.tokenizer is None:
            raise ValueError("a server needs a tokenizer; give a target folder that has one")
        scheduler = Scheduler(loaded.engine, self.settings.max_queue, self.settings.served_model_name)
        if self.accompany is not None:
            companion = self.accompany(loaded, lambda: scheduler.running + scheduler.waiting > 0)
            scheduler.keep, self._companion = companion.keep, companion
            version = "Version of the head that drafts, counted from 0."
            scheduler.metrics.gauge("aquiline:head_version", version, lambda: companion.health()["version"])
        scheduler.start()
        self.loaded, self.scheduler = loaded, scheduler

    def close(self) -> None:
        """Ends the companion and the worker."""
        if self._companion is not None:
            self._companion.stop()
        if self.scheduler is not None:
            self.scheduler.stop()

    @property
    def app(self) -> Any:
        """The ASGI application."""
        return Guard(self._dispatch, self.settings, self._count_refusal)

    async def _dispatch(self, scope: Any, receive: Any, send: Any) -> None:
        path, method = scope["path"], "GET" if scope["method"] == "HEAD" else scope["method"]
        routes = {
            "/": ("GET", self._page),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
            "/v1/models": ("GET", self._models),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
        }
        if path.startswith("/v1/models/"):
            path, routes = "", {"": ("GET", self._model)}
        if path not in routes:
            raise ApiError(404, f"the path is unknown; allowed: {', '.join(routes)}", code="not_found")
        allowed, endpoint = routes[path]
        if method != allowed:
            raise ApiError(405, f"the method is {method[:20]}; allowed: {allowed}", code="method_not_allowed")
        response = await endpoint(HttpRequest(scope, receive))
        await response(scope, receive, send)

    def _count_refusal(self, status: int) -> None:
        if self.scheduler is not None:
            self.scheduler.metrics.refuse(status)

    # -- the small endpoints ---------------------------------------------------------------------

    def _parts(self) -> tuple[Loaded, Scheduler]:
        if self.loaded is None or self.scheduler is None:
            raise ApiError(503, "the model is still loading; try again shortly", "server_error", retry_after=5)
        return self.loaded, self.scheduler

    async def _page(self, request: HttpRequest) -> Response:
        page = files("aquiline.serve").joinpath("page.html").read_text(encoding="utf-8")
        policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
        policy += "; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    async def _health(self, request: HttpRequest) -> Response:
        loaded, _ = self._parts()
        watch = loaded.watch
        alarms = [dataclasses.asdict(alarm) for alarm in list(watch.alarms)]
        more = {} if self._companion is None else {"renewal": self._companion.health()}
        return answer_json({"status": "ok", "acceptance": watch.rates, "alarms": alarms, **more})

    async def _metrics(self, request: HttpRequest) -> Response:
        _, scheduler = self._parts()
        return Response(scheduler.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: HttpRequest) -> Response:
        return answer_json({"object": "list", "data": [self._card()]})

    async def _model(self, request: HttpRequest) -> Response:
        self._check_model(request.scope["path"].removeprefix("/v1/models/"))
        return answer_json(self._card())

    def _card(self) -> dict[str, Any]:
        loaded, _ = self._parts()
        return {
            "id": self.settings.served_model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "aquiline",
            "max_model_len": loaded.target.shape.max_positions,
            "drafting": loaded.draft_name,
        }

    def _check_model(self, name: Any) -> None:
        if name is not None and name != self.settings.served_model_name:
            shown = json.dumps(name)[:100]
            message = f"model is {shown}; allowed: {json.dumps(self.settings.served_model_name)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _tokenize(self, request: HttpRequest) -> Response:
        loaded, _ = self._parts()
        fields = Fields(parse_json(await request.body()))
        fields.take("model", text)
        prompt, special = fields.need("prompt", text), fields.take("add_special_tokens", flag, True)
        fields.done()
        tokens = await asyncio.to_thread(_tokens, loaded, prompt, special)  # a long text takes a while
        length = loaded.target.shape.max_positions
        return answer_json({"tokens": tokens, "count": len(tokens), "max_model_len": length})

    async def _detokenize(self, request: HttpRequest) -> Response:
        loaded, _ = self._parts()
        fields = Fields(parse_json(await request.body()))
        fields.take("model", text)
        tokens = fields.need("tokens", token_ids)
        fields.done()
        size = loaded.target.shape.vocab_size
        outside = next((token for token in tokens if token >= size), None)
        if outside is not None:
            raise ApiError(400, f"tokens has {outside}; allowed: 0 … {size - 1}", param="tokens")
        return answer_json({"prompt": await asyncio.to_thread(loaded.tokenizer.decode, list(tokens))})

    # -- completions -----------------------------------------------------------------------------

    async def _chat(self, request: HttpRequest) -> Response:
        return await self._complete(request, True, read_chat)

    async def _completion(self, request: HttpRequest) -> Response:
        return await self._complete(request, False, read_completion)

    async def _complete(self, request: HttpRequest, chat: bool, read: Callable[[Loaded, Any], Asked]) -> Response:
        loaded, scheduler = self._parts()
        body = parse_json(await request.body())
        if isinstance(body, dict):
            self._check_model(body.get("model"))
        # In a thread, because tokenizing and compiling a grammar take a while.
        asked, emissions = await asyncio.to_thread(_prepared, loaded, scheduler, read, body)
        name = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        answer = Answer(chat, name, self.settings.served_model_name, asked, emissions, loaded.tokenizer)
        request.scope["aquiline"] = answer.usage
        deliveries = _deliveries(scheduler, asked, emissions, self.settings.timeout, request.receive)
        try:
            first = await anext(deliveries)
        except BaseException:
            await deliveries.aclose()
            raise
        if asked.stream:
            return EventStream(answer, first, deliveries)
        answer.first()  # with `echo`, the prompts precede the completions
        for delivery in first:
            answer.take(delivery)
        async for more in deliveries:
            for delivery in more:
                answer.take(delivery)
        return answer_json(answer.whole())


def _tokens(loaded: Loaded, prompt: str, special: bool) -> list[int]:
    try:
        if prompt and special:
            return encode_prompt(loaded.tokenizer, prompt, raw=True)
        tokens: list[int] = tokenized(loaded.tokenizer, prompt, add_special_tokens=special)["input_ids"]
        return tokens
    except (ValueError, TypeError) as error:
        raise ApiError(400, f"prompt: {error}", param="prompt") from error


def _prepared(
    loaded: Loaded, scheduler: Scheduler, read: Callable[[Loaded, Any], Asked], body: Any
) -> tuple[Asked, list[Emission]]:
    """Reads a body; returns it with its outputs, n per prompt."""
    asked = read(loaded, body)
    count = sum(request.params.n for request in asked.requests)
    if count > scheduler.limit:
        raise ApiError(400, f"{count} outputs in one request; allowed: {scheduler.limit}; send fewer", param="n")
    made = [outputs_of(loaded.engine, request, scheduler.next_index()) for request in asked.requests]
    return asked, [emission for outputs in made for emission in outputs]


async def _deliveries(
    scheduler: Scheduler, asked: Asked, emissions: list[Emission], timeout: float, receive: Callable[[], Awaitable[Any]]
) -> AsyncGenerator[Deliveries, None]:
    """Submits a job and yields what has arrived; closing the generator cancels the job."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Delivery]()

    def deliver(delivery: Delivery) -> None:
        with suppress(RuntimeError):  # the loop has ended, so nothing waits
            loop.call_soon_threadsafe(arrived.put_nowait, delivery)

    score = asked.requests[0].params.logprobs if asked.echo else None
    now = time.monotonic()
    job = Job(emissions, deliver, now + timeout, score, asked.store, now)
    try:
        scheduler.submit(job)
    except Busy as error:
        raise ApiError(429, str(error), "rate_limit_error", code="queue_full", retry_after=1) from error
    gone = asyncio.ensure_future(_disconnect(receive))
    gone.add_done_callback(lambda _: arrived.put_nowait(Disconnected()))
    left = len(emissions)
    try:
        while left:
            events = list[StreamEvent | PromptScores]()
            for delivery in [await arrived.get(), *(arrived.get_nowait() for _ in range(arrived.qsize()))]:
                if isinstance(delivery, Exception):
                    if events:
                        yield events
                    raise _worded(delivery)
                events.append(delivery)
                left -= isinstance(delivery, StreamEvent) and delivery.output is not None
            yield events
    finally:
        gone.cancel()
        if left:
            scheduler.cancel(job)


async def _disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _worded(error: Exception) -> Exception:
    """Returns the error that the client sees, if it is still there."""
    if isinstance(error, Disconnected):
        return error
    if isinstance(error, TimeoutError):
        return ApiError(504, f"{error}; ask for fewer tokens, or raise the server's --timeout", "timeout_error")
    if out_of_memory(error):
        return ApiError(503, "the server ran out of memory; send less or try later", "server_error", retry_after=10)
    if isinstance(error, ValueError):  # logit_bias bars every token, for example
        return ApiError(400, str(error))
    return ApiError(500, "the server failed; see its log", "server_error")


def answer_json(body: Any) -> Response:
    """Builds a JSON answer; lone surrogates from the client's own text stay escaped."""
    return Response(json.dumps(body), media_type="application/json")
