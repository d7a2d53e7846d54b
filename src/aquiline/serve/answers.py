"""Formats answers as OpenAI does: whole, or in the chunks of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from aquiline.engine.emission import Emission
from aquiline.engine.request import StreamEvent
from aquiline.serve.asked import Asked
from aquiline.serve.fields import ApiError, Disconnected
from aquiline.serve.scheduler import PromptScores

Deliveries = Sequence[StreamEvent | PromptScores]
"""What steps gave to one request since it was last asked for."""

_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


@dataclass(eq=False)
class _Choice:
    """One output so far; a stream keeps nothing of it."""

    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    provenance: list[dict[str, Any]] = field(default_factory=list)


class Answer:
    """Formats the events of one request for its client.

    Args:
        chat: chat completion, or else text completion.
        name: the request's id.
        emissions: its outputs, n per prompt, in order.
    """

    def __init__(
        self, chat: bool, name: str, model: str, asked: Asked, emissions: Sequence[Emission], tokenizer: Any
    ) -> None:
        self.chat, self.asked, self.emissions, self.tokenizer = chat, asked, emissions, tokenizer
        kind = "chat.completion" if chat else "text_completion"
        self._base = {"id": name, "object": kind, "created": int(time.time()), "model": model}
        self._place = {(e.index, e.sample): i for i, e in enumerate(emissions)}
        self._choices = [_Choice() for _ in emissions]
        self._samples = len(emissions) // len(asked.requests)
        self._shown = [0] * len(emissions)  # characters before the next token, for text_offset
        self._frames = [self._frame(place) for place in self._places()] if asked.stream else []

    def take(self, event: StreamEvent | PromptScores) -> bytes:
        """Adds an event; returns what a stream sends for it."""
        if isinstance(event, PromptScores):
            places = [i for i, emission in enumerate(self.emissions) if emission.index == event.index]
            return b"".join(self._echo(place, event) for place in places)
        place = self._place[event.index, event.sample]
        reason = None if event.finish_reason is None else _REASONS[event.finish_reason]
        return self._add(place, event.text, self._scored(place, event), [vars(p) for p in event.pieces or []], reason)

    def _add(
        self,
        place: int,
        text: str,
        logprobs: list[dict[str, Any]],
        pieces: list[dict[str, Any]],
        reason: str | None = None,
    ) -> bytes:
        if not self.asked.stream:
            choice = self._choices[place]
            choice.text.append(text)
            choice.logprobs += logprobs
            choice.provenance += pieces
            choice.finish_reason = reason
            return b""
        sent = b""
        if logprobs or pieces:
            sent = sse(self._chunk(place, text, logprobs, pieces))
        elif text:
            before, after = self._frames[place]
            sent = before + json.dumps(text).encode() + after
        return sent if reason is None else sent + sse(self._last(place, reason))

    # -- whole answers -------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        """The answer without a stream."""
        choices = []
        for place, choice in enumerate(self._choices):
            entry: dict[str, Any] = {"index": place, "finish_reason": choice.finish_reason}
            entry["logprobs"] = self._logprobs(choice.logprobs) if self.asked.logprobs else None
            if self.chat:
                entry["message"] = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
            else:
                entry["text"] = "".join(choice.text)
            if self.asked.requests[0].provenance:
                entry["provenance"] = choice.provenance
            choices.append(entry)
        return self._base | {"choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Counts of tokens."""
        prompt = sum(len(request.tokens) for request in self.asked.requests)
        emitted = sum(emission.occupant.stats.emitted for emission in self.emissions)
        firsts = self.emissions[:: self._samples]
        found: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": emitted,
            "total_tokens": prompt + emitted,
            "prompt_tokens_details": {"cached_tokens": sum(emission.cached for emission in firsts)},
        }
        if self.asked.prediction is not None:
            accepted = sum(emission.sources["prediction"] for emission in self.emissions)
            found["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": max(0, self.asked.prediction.proposed - accepted),
            }
        return found

    # -- streams -------------------------------------------------------------------------------

    def first(self) -> bytes:
        """Begins the answer: with the roles in a chat, with the prompts if they are echoed without scores."""
        if self.chat:
            role = {"delta": {"role": "assistant", "content": ""}}
            return b"".join(sse(self._stream_chunk(place, role)) for place in self._places())
        if self.asked.echo and not self.asked.logprobs:
            return b"".join(self._echo(place, None) for place in self._places())
        return b""

    def last(self) -> bytes:
        """Returns the chunk with the usage, if it was requested."""
        return sse(self._stream_base() | {"choices": [], "usage": self.usage()}) if self.asked.include_usage else b""

    def _places(self) -> range:
        return range(len(self._choices))

    def _frame(self, place: int) -> tuple[bytes, bytes]:
        """Returns what a chunk with nothing but text has before and after it: building one each time costs more."""
        mark = f"text of {self._base['id']}"
        before, _, after = sse(self._chunk(place, mark, [], [])).partition(json.dumps(mark).encode())
        return before, after

    def _chunk(
        self, place: int, text: str, logprobs: list[dict[str, Any]], pieces: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        entry: dict[str, Any] = {"delta": {"content": text}} if self.chat else {"text": text}
        entry["logprobs"] = self._logprobs(logprobs) if self.asked.logprobs else None
        if self.asked.requests[0].provenance:
            entry["provenance"] = list(pieces)
        return self._stream_chunk(place, entry)

    def _last(self, place: int, reason: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        return self._stream_chunk(place, entry | {"finish_reason": reason})

    def _stream_chunk(self, place: int, entry: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": place, "logprobs": None, "finish_reason": None} | entry
        usage = {"usage": None} if self.asked.include_usage else {}
        return self._stream_base() | {"choices": [choice]} | usage

    def _stream_base(self) -> dict[str, Any]:
        return self._base | {"object": "chat.completion.chunk"} if self.chat else dict(self._base)

    # -- log-probabilities ---------------------------------------------------------------------

    def _echo(self, place: int, scores: PromptScores | None) -> bytes:
        """Adds the prompt, at the beginning of a completion."""
        index = place // self._samples
        prompt, logprobs = self.asked.prompts[index], list[dict[str, Any]]()
        if scores is not None:
            for token, value, best in zip(
                self.asked.requests[index].tokens,
                [None, *scores.logprobs],
                [None, *scores.top_logprobs],
                strict=True,
            ):
                logprobs.append(self._entry(place, token, value, best))
        return self._add(place, prompt, logprobs, [])

    def _scored(self, place: int, event: StreamEvent) -> list[dict[str, Any]]:
        if event.logprobs is None:
            return []
        best = event.top_logprobs or [{} for _ in event.token_ids]
        rows = zip(event.token_ids, event.logprobs, best, strict=True)
        return [self._entry(place, token, value, alternatives) for token, value, alternatives in rows]

    def _entry(self, place: int, token: int, value: float | None, best: dict[int, float] | None) -> dict[str, Any]:
        """One token in the form of chat completions; `_logprobs` converts it for text completions."""
        entry = self._token(token) | {"logprob": value, "offset": self._shown[place]}
        self._shown[place] += len(entry["token"])
        alternatives = None if best is None else [self._token(t) | {"logprob": p} for t, p in best.items()]
        return entry | {"top_logprobs": alternatives}

    def _token(self, token: int) -> dict[str, Any]:
        text = self.tokenizer.decode([token])
        # Part of a character has no text of its own.
        return {"token": text, "bytes": None if "\ufffd" in text else list(text.encode())}

    def _logprobs(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if self.chat:
            return {"content": [{k: v for k, v in entry.items() if k != "offset"} for entry in entries]}
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [_alternatives(entry) for entry in entries],
            "text_offset": [entry["offset"] for entry in entries],
        }


def _alternatives(entry: dict[str, Any]) -> dict[str, float] | None:
    """Text → log-probability, the token itself included; of several tokens with one text the likeliest."""
    if entry["top_logprobs"] is None:
        return None
    found: dict[str, float] = {}
    for each in [*entry["top_logprobs"], entry]:
        found[each["token"]] = max(each["logprob"], found.get(each["token"], -float("inf")))
    return found


def sse(body: dict[str, Any]) -> bytes:
    """Returns one server-sent event."""
    return b"data: %b\n\n" % json.dumps(body).encode()


class EventStream(Response):
    """Sends an answer as server-sent events; those that are ready together in one piece."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, first: Deliveries, more: AsyncGenerator[Deliveries, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answer, self._first, self._more = answer, first, more

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        take = self._answer.take

        async def write(body: bytes, more: bool = True) -> None:
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await write(self._answer.first() + b"".join(map(take, self._first)))
            async for deliveries in self._more:
                await write(b"".join(map(take, deliveries)))
            await write(self._answer.last())
        except ApiError as error:
            await write(sse(error.body))
        except Disconnected:
            return
        finally:
            await self._more.aclose()
        await write(b"data: [DONE]\n\n", more=False)
