"""Holds conversations that keep their keys and values across turns."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from aquiline.checks import check_kind
from aquiline.engine.batch import Batch, capacity_for
from aquiline.engine.emission import Emission, outputs_of
from aquiline.engine.request import Engine, GenerationOutput, Request, StreamEvent, check, merged_params
from aquiline.engine.text import encode_prompt
from aquiline.sampling import SamplingParams


class ChatSession:
    """A conversation; each turn computes only new tokens.

    A chat template does not always extend its earlier rendering: it may drop thoughts, and
    answers may tokenize differently than they were generated. So each turn renders the whole
    conversation, keeps the longest prefix whose tokens are already cached by target and drafter,
    and computes the rest. The result equals a computation from scratch.

    Args:
        engine: its tokenizer must have a chat template.
        messages: a conversation to continue, with "role" and "content".
        defaults: settings for answers without their own; `n` must be 1.
        tools: descriptions of tools, for the chat template.
        chat_template_kwargs: variables of the chat template, such as ``{"enable_thinking": False}``.

    Raises:
        ValueError: if the tokenizer has no chat template, or n is not 1.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        system: str | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
        defaults: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not getattr(engine.tokenizer, "chat_template", None):
            raise ValueError("a chat needs a tokenizer with a chat template; use an instruction-tuned model")
        check_kind("system", system, isinstance(system, str | None), "a text or None")
        self.engine = engine
        self.defaults = _single(defaults or SamplingParams())
        self.messages: list[dict[str, Any]] = [dict(message) for message in messages]
        if system is not None:
            self.messages.insert(0, {"role": "system", "content": system})
        self._template: dict[str, Any] = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        self._batch: Batch | None = None
        self._answering = False

    def send(self, message: str, params: SamplingParams | None = None, **settings: Any) -> GenerationOutput:
        """Sends `message` and returns the whole answer; see `stream`."""
        outputs = [event.output for event in self.stream(message, params, **settings)]
        assert outputs[-1] is not None, "a complete stream ends with the output"
        return outputs[-1]

    def stream(
        self, message: str, params: SamplingParams | None = None, **settings: Any
    ) -> Generator[StreamEvent, None, None]:
        """Sends `message` and yields the answer as it is generated.

        Both are appended to `messages` when the answer ends. If the stream is closed or
        interrupted, the text yielded so far is kept; if there is none, the turn is dropped.

        Args:
            params: settings of this answer, in place of the defaults.
            **settings: fields of `SamplingParams` that override them.

        Raises:
            ValueError: at the call, before any work, if the conversation no longer fits.
            RuntimeError: if an earlier answer is still being streamed.
        """
        if self._answering:
            raise RuntimeError("the last answer is still being streamed; finish or close it first")
        check_kind("the message", message, isinstance(message, str), "a text")
        params = _single(merged_params(params, self.defaults, settings))
        turn = {"role": "user", "content": message}
        tokens = encode_prompt(self.engine.tokenizer, [*self.messages, turn], **self._template)
        room = self.engine.target.shape.max_positions - len(tokens)
        if room < max(1, params.min_new_tokens) and self.messages:
            raise ValueError(
                f"the conversation has {len(tokens)} tokens and leaves no room for an answer in the context of "
                f"{room + len(tokens)}; begin a new one"
            )
        request = Request(tokens, params)
        check(self.engine, request)
        return self._answer(turn, outputs_of(self.engine, request, 0)[0])

    def close(self) -> None:
        """Frees the keys and values; the next turn recomputes them."""
        self._batch = None

    def _answer(self, turn: dict[str, Any], emission: Emission) -> Generator[StreamEvent, None, None]:
        if self._answering:
            raise RuntimeError("the last answer is still being streamed; finish or close it first")
        self._answering = True
        pieces: list[str] = []
        finished = emission.finish_reason is not None  # max_new_tokens is 0
        try:
            if finished:
                yield StreamEvent(0, [], "", emission.finish_reason, emission.output())
                return
            batch = self._batch = self._batch or Batch(self.engine, 1, capacity_for([emission]))
            batch.state.generator.manual_seed(emission.seed)
            batch.submit(emission)
            while batch.busy:
                for event in batch.advance():
                    if event.error is not None:
                        raise event.error
                    finished = event.output is not None
                    pieces.append(event.text)
                    yield event
        finally:
            if self._batch is not None:
                self._batch.drop_requests()
            answer = "".join(pieces)
            if finished or answer:
                self.messages += [turn, {"role": "assistant", "content": answer}]
            self._answering = False


def _single(params: SamplingParams) -> SamplingParams:
    if params.n != 1:
        raise ValueError(f"n is {params.n}; allowed in a chat: 1; use generate for several outputs")
    return params
