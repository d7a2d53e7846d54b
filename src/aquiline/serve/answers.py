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

_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


@dataclass(eq=False)
class _Choice:
    """One output so far."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    provenance: list[dict[str, Any]] = field(default_factory=list)


class Answer:
    """Collects the events of one request and formats them for its client.

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

    # -- whole answers -------------------------------------------------------------------------

    def take(self, event: StreamEvent | PromptScores) -> list[dict[str, Any]]:
        """Adds an event; returns the chunks that a stream sends for it."""
        if isinstance(event, PromptScores):
            places = [i for i, emission in enumerate(self.emissions) if emission.index == event.index]
            return [chunk for place in places for chunk in self._echo(place, event)]
        place = self._place[event.index, event.sample]
        choice, chunks = self._choices[place], list[dict[str, Any]]()
        logprobs = self._scored(place, event)
        pieces = [vars(piece) for piece in event.pieces or []]
        choice.text += event.text
        choice.provenance += pieces
        if event.text or logprobs or pieces:
            chunks.append(self._chunk(place, event.text, logprobs, pieces))
        if event.finish_reason is not None:
            choice.finish_reason = _REASONS[event.finish_reason]
            chunks.append(self._last(place))
        return chunks

    def whole(self) -> dict[str, Any]:
        """The answer without a stream."""
        choices = []
        for place, choice in enumerate(self._choices):
            entry: dict[str, Any] = {"index": place, "finish_reason": choice.finish_reason}
            entry["logprobs"] = self._logprobs(choice.logprobs) if self.asked.logprobs else None
            if self.chat:
                entry["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
            else:
                entry["text"] = choice.text
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

    def first(self) -> list[dict[str, Any]]:
        """Returns the chunks that begin a stream: the roles in a chat, the prompts with `echo`."""
        if self.chat:
            return [self._stream_chunk(i, {"delta": {"role": "assistant", "content": ""}}) for i in self._places()]
        if self.asked.echo and not self.asked.logprobs:
            return [chunk for place in self._places() for chunk in self._echo(place, None)]
        return []

    def last(self) -> list[dict[str, Any]]:
        """Returns the chunk with the usage, if it was requested."""
        return [self._stream_base() | {"choices": [], "usage": self.usage()}] if self.asked.include_usage else []

    def _places(self) -> range:
        return range(len(self._choices))

    def _chunk(
        self, place: int, text: str, logprobs: list[dict[str, Any]], pieces: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        entry: dict[str, Any] = {"delta": {"content": text}} if self.chat else {"text": text}
        entry["logprobs"] = self._logprobs(logprobs) if self.asked.logprobs else None
        if self.asked.requests[0].provenance:
            entry["provenance"] = list(pieces)
        return self._stream_chunk(place, entry)

    def _last(self, place: int) -> dict[str, Any]:
        entry: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        return self._stream_chunk(place, entry | {"finish_reason": self._choices[place].finish_reason})

    def _stream_chunk(self, place: int, entry: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": place, "logprobs": None, "finish_reason": None} | entry
        usage = {"usage": None} if self.asked.include_usage else {}
        return self._stream_base() | {"choices": [choice]} | usage

    def _stream_base(self) -> dict[str, Any]:
        return self._base | {"object": "chat.completion.chunk"} if self.chat else dict(self._base)

    # -- log-probabilities ---------------------------------------------------------------------

    def _echo(self, place: int, scores: PromptScores | None) -> list[dict[str, Any]]:
        """The prompt at the beginning of a completion."""
        choice, index = self._choices[place], place // self._samples
        prompt, logprobs = self.asked.prompts[index], list[dict[str, Any]]()
        if scores is not None:
            for token, value, best in zip(
                self.asked.requests[index].tokens,
                [None, *scores.logprobs],
                [None, *scores.top_logprobs],
                strict=True,
            ):
                logprobs.append(self._entry(place, token, value, best))
            choice.logprobs += logprobs
        choice.text += prompt
        return [self._chunk(place, prompt, logprobs, [])]

    def _scored(self, place: int, event: StreamEvent) -> list[dict[str, Any]]:
        if event.logprobs is None:
            return []
        best = event.top_logprobs or [{} for _ in event.token_ids]
        rows = zip(event.token_ids, event.logprobs, best, strict=True)
        entries = [self._entry(place, token, value, alternatives) for token, value, alternatives in rows]
        self._choices[place].logprobs += entries
        return entries

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


class EventStream(Response):
    """Sends an answer as server-sent events, one chunk each."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, first: Any, deliveries: AsyncGenerator[Any, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answer, self._first, self._deliveries = answer, first, deliveries

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def write(chunks: list[dict[str, Any]]) -> None:
            data = b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks)
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            await write([*self._answer.first(), *self._answer.take(self._first)])
            async for delivery in self._deliveries:
                await write(self._answer.take(delivery))
            await write(self._answer.last())
        except ApiError as error:
            await write([error.body])
        except Disconnected:
            return
        finally:
            await self._deliveries.aclose()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
