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

from aquiline.engine.emission import Emission, outputs_of
from aquiline.engine.request import GenerationOutput, StreamEvent
from aquiline.engine.text import encode_prompt
from aquiline.loading import Loaded
from aquiline.serve.answers import Answer, EventStream
from aquiline.serve.asked import Asked, read_chat, read_completion
from aquiline.serve.fields import ApiError, Disconnected, Fields, flag, parse_json, text, token_ids
from aquiline.serve.guard import Guard, ServerSettings
from aquiline.serve.scheduler import Busy, Delivery, Job, Scheduler

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
        try:
            tokens = encode_prompt(loaded.tokenizer, prompt, raw=True) if prompt and special else None
            if tokens is None:
                tokens = loaded.tokenizer(prompt, add_special_tokens=special)["input_ids"]
        except (ValueError, TypeError) as error:
            raise ApiError(400, f"prompt: {error}", param="prompt") from error
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
        return answer_json({"prompt": loaded.tokenizer.decode(list(tokens))})

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
        asked = await asyncio.to_thread(read, loaded, body)
        emissions = await asyncio.to_thread(_emissions, loaded, scheduler, asked)
        name = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        answer = Answer(chat, name, self.settings.served_model_name, asked, emissions, loaded.tokenizer)
        run = _Run(scheduler, answer, asked, emissions, self.settings.timeout)
        request.scope["aquiline"] = run.usage
        deliveries = run.deliveries(request.receive)
        try:
            first = await anext(deliveries)
        except BaseException:
            await deliveries.aclose()
            raise
        if asked.stream:
            return EventStream(answer, first, deliveries)
        answer.first()  # with `echo`, the prompts precede the completions
        answer.take(first)
        async for delivery in deliveries:
            answer.take(delivery)
        return answer_json(answer.whole())


def _emissions(loaded: Loaded, scheduler: Scheduler, asked: Asked) -> list[Emission]:
    """The outputs of a request: n per prompt."""
    count = sum(request.params.n for request in asked.requests)
    if count > scheduler.limit:
        raise ApiError(400, f"{count} outputs in one request; allowed: {scheduler.limit}; send fewer", param="n")
    made = [outputs_of(loaded.engine, request, scheduler.next_index()) for request in asked.requests]
    return [emission for outputs in made for emission in outputs]


@dataclass(eq=False)
class _Run:
    """One request on its way through the scheduler."""

    scheduler: Scheduler
    answer: Answer
    asked: Asked
    emissions: list[Emission]
    timeout: float

    def usage(self) -> dict[str, Any]:
        """Returns the token counts for the access log."""
        found = self.answer.usage()
        return {name: found[name] for name in ("prompt_tokens", "completion_tokens")}

    async def deliveries(self, receive: Callable[[], Awaitable[Any]]) -> AsyncGenerator[Any, None]:
        """Submits the job and yields its deliveries; closing the generator cancels the job."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Delivery]()

        def deliver(delivery: Delivery) -> None:
            with suppress(RuntimeError):  # the loop has ended, so nothing waits
                loop.call_soon_threadsafe(arrived.put_nowait, delivery)

        score = self.asked.requests[0].params.logprobs if self.asked.echo else None
        now = time.monotonic()
        job = Job(self.emissions, deliver, now + self.timeout, score, self.asked.store, now)
        try:
            self.scheduler.submit(job)
        except Busy as error:
            raise ApiError(429, str(error), "rate_limit_error", code="queue_full", retry_after=1) from error
        gone = asyncio.ensure_future(_disconnect(receive))
        gone.add_done_callback(lambda _: arrived.put_nowait(Disconnected()))
        left = len(self.emissions)
        try:
            while left:
                delivery = await arrived.get()
                if isinstance(delivery, Exception):
                    raise delivery if isinstance(delivery, Disconnected) else _worded(delivery)
                if isinstance(delivery, StreamEvent):
                    if delivery.error is not None:
                        raise _worded(delivery.error)
                    left -= delivery.output is not None
                yield delivery
        finally:
            gone.cancel()
            if left:
                self.scheduler.cancel(job)


async def _disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _worded(error: Exception) -> ApiError:
    """Returns the error that the client sees."""
    if isinstance(error, TimeoutError):
        return ApiError(504, f"{error}; ask for fewer tokens, or raise the server's --timeout", "timeout_error")
    if isinstance(error, MemoryError):
        return ApiError(503, "the server ran out of memory; send less or try later", "server_error", retry_after=10)
    if isinstance(error, ValueError):  # logit_bias bars every token, for example
        return ApiError(400, str(error))
    return ApiError(500, "the server failed; see its log", "server_error")


def answer_json(body: Any) -> Response:
    """Builds a JSON answer; lone surrogates from the client's own text stay escaped."""
    return Response(json.dumps(body), media_type="application/json")
