"""Reads OpenAI's request bodies strictly into this engine's requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from aquiline.drafters.drafter import Drafting
from aquiline.drafters.store import Prediction
from aquiline.engine.grammar import json_schema
from aquiline.engine.request import Request, check
from aquiline.engine.text import encode_expected, encode_prompt
from aquiline.loading import Loaded
from aquiline.serve.conversation import chat_tokens, content_text
from aquiline.serve.fields import (
    ApiError,
    Fields,
    biases,
    flag,
    integer,
    invalid,
    listed,
    mapping,
    number,
    one_of,
    strings,
    text,
    token_ids,
)

MOST_ALTERNATIVES = 20
"""Largest top_logprobs, as OpenAI has it."""


@dataclass(frozen=True, eq=False)
class Asked:
    """A parsed HTTP request.

    Attributes:
        requests: one per prompt.
        prompts: the prompts' texts, for `echo`.
        stream: answer with server-sent events.
        include_usage: end a stream with the usage.
        logprobs: report log-probabilities.
        echo: begin each completion with its prompt.
        prediction: the expected text, if there is one.
        store: the conversation may be kept, if the server keeps any.
    """

    requests: list[Request]
    prompts: list[str]
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    echo: bool = False
    prediction: Prediction | None = None
    store: bool = True


def read_chat(loaded: Loaded, body: Any) -> Asked:
    """Reads the body of /v1/chat/completions."""
    fields = Fields(body)
    tokens = chat_tokens(loaded.tokenizer, fields)
    logprobs = fields.take("logprobs", flag, False)
    top = fields.take("top_logprobs", integer(0, MOST_ALTERNATIVES))
    if top is not None and not logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true; add it", param="top_logprobs")
    settings: dict[str, Any] = {"logprobs": (top or 0) if logprobs else None}
    limits = [fields.take(name, integer(1)) for name in ("max_completion_tokens", "max_tokens")]
    if None not in limits:
        message = "max_tokens has no effect beside max_completion_tokens; drop one of the two"
        raise ApiError(400, message, param="max_tokens")
    settings["max_new_tokens"] = next((n for n in limits if n is not None), loaded.target.shape.max_positions)
    prediction = fields.take("prediction", lambda name, value: _prediction(loaded, name, value))
    fields.take("modalities", one_of(["text"]))
    return _asked(loaded, fields, [tokens], settings, prediction=prediction, logprobs=logprobs)


def read_completion(loaded: Loaded, body: Any) -> Asked:
    """Reads the body of /v1/completions."""
    fields = Fields(body)
    prompts = fields.need("prompt", _prompts)
    encoded = [_encoded(loaded, prompt) for prompt in prompts]
    logprobs = fields.take("logprobs", integer(0, MOST_ALTERNATIVES))
    settings = {"logprobs": logprobs, "max_new_tokens": fields.take("max_tokens", integer(0), 16)}
    fields.take("suffix", one_of(""))
    fields.take("best_of", one_of(1))
    echo = fields.take("echo", flag, False)
    return _asked(loaded, fields, encoded, settings, echo=echo, logprobs=logprobs is not None)


def _asked(loaded: Loaded, fields: Fields, prompts: list[list[int]], settings: dict[str, Any], **more: Any) -> Asked:
    """Reads the fields that both endpoints share, and checks the requests."""
    stream = fields.take("stream", flag, False)
    include_usage = fields.take("stream_options", _stream_options)
    if include_usage is not None and not stream:
        raise ApiError(400, "stream_options needs stream: true; add it", param="stream_options")
    params = replace(loaded.defaults, **(settings | _sampling(fields)))
    schema = fields.take("response_format", _schema)
    if schema is not None:
        params = replace(params, logits_processors=(_grammar(loaded, schema),))
    drafting = fields.take("speculation", _speculation, Drafting())
    prediction = more.get("prediction")
    if prediction is not None and params.n > 1:
        raise ApiError(400, "prediction allows n: 1 only; drop one of the two", param="prediction")
    drafting = replace(drafting, expected=prediction)
    provenance = fields.take("provenance", flag, False)
    store = fields.take("store", one_of(False)) is None
    _take_without_effect(fields)
    fields.done()
    requests = [Request(tokens, params, drafting, provenance) for tokens in prompts]
    for request in requests:
        _check(loaded, request)
    texts = [loaded.tokenizer.decode(tokens) for tokens in prompts] if more.get("echo") else [""] * len(prompts)
    return Asked(requests, texts, stream, bool(include_usage), store=store, **more)


def _sampling(fields: Fields) -> dict[str, Any]:
    """Returns the sampling settings that were sent, OpenAI's and vLLM's additions."""
    readers = {
        "temperature": ("temperature", number(0, 2)),
        "top_p": ("top_p", number(0, 1, excluded=0)),
        "n": ("n", integer(1, 128)),
        "seed": ("seed", integer(-(1 << 63))),
        "stop": ("stop", strings),
        "presence_penalty": ("presence_penalty", number(-2, 2)),
        "frequency_penalty": ("frequency_penalty", number(-2, 2)),
        "logit_bias": ("logit_bias", biases),
        "top_k": ("top_k", integer(-1, 1 << 31)),
        "min_p": ("min_p", number(0, 1, excluded=1)),
        "repetition_penalty": ("repetition_penalty", number(0, 1e6, excluded=0)),
        "min_tokens": ("min_new_tokens", integer(0)),
        "ignore_eos": ("ignore_eos", flag),
        "stop_token_ids": ("stop_token_ids", token_ids),
        "skip_special_tokens": ("skip_special_tokens", flag),
    }
    found = {ours: fields.take(name, read) for name, (ours, read) in readers.items()}
    given = {name: value for name, value in found.items() if value is not None}
    if given.get("top_k") == -1:  # vLLM's word for off
        given["top_k"] = 0
    return given


def _take_without_effect(fields: Fields) -> None:
    """Accepts fields that identify the user or request the only behaviour there is."""
    fields.take("model", text)
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        fields.take(name, text)
    fields.take("service_tier", one_of("auto", "default"))
    fields.take("metadata", one_of({}))


def _check(loaded: Loaded, request: Request) -> None:
    try:
        check(loaded.engine, request)
    except (ValueError, TypeError) as error:
        code = "context_length_exceeded" if "context" in str(error) else None
        raise ApiError(400, str(error), code=code) from error


def _encoded(loaded: Loaded, prompt: Any) -> list[int]:
    try:
        return encode_prompt(loaded.tokenizer, prompt, raw=True)
    except (ValueError, TypeError) as error:
        raise ApiError(400, f"prompt: {error}", param="prompt") from error


def _prompts(name: str, value: Any) -> list[Any]:
    """The prompts: a text, token ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if listed(name, value) and all(isinstance(each, str) for each in value):
        return list(value)
    if value and all(isinstance(each, list) for each in value):
        return [list(token_ids(f"{name}[{i}]", each)) for i, each in enumerate(value)]
    if value and all(isinstance(each, int) for each in value):
        return [list(token_ids(name, value))]
    raise invalid(name, value, "a text, a list of texts, token ids, or a list of lists of token ids")


def _prediction(loaded: Loaded, name: str, value: Any) -> Prediction:
    fields = Fields(value, name)
    fields.need("type", one_of("content"))
    content = fields.need("content", content_text)
    fields.done()
    try:
        return Prediction(encode_expected(loaded.tokenizer, content))
    except ValueError as error:
        raise ApiError(400, f"{name}: {error}", param=name) from error


def _stream_options(name: str, value: Any) -> bool:
    fields = Fields(value, name)
    include_usage: bool = fields.take("include_usage", flag, False)
    fields.take("include_obfuscation", one_of(False))
    fields.done()
    return include_usage


def _schema(name: str, value: Any) -> Mapping[str, Any] | None:
    """Returns the JSON schema that the answer must match; None for any text."""
    fields = Fields(value, name)
    kind = fields.need("type", one_of("text", "json_object", "json_schema"))
    schema: Mapping[str, Any] | None = {"type": "object"} if kind == "json_object" else None
    if kind == "json_schema":
        inner = Fields(fields.need("json_schema", lambda _, each: each), f"{name}.json_schema")
        inner.need("name", text)
        inner.take("description", text)
        inner.take("strict", flag)
        schema = inner.need("schema", mapping)
        inner.done()
    fields.done()
    return schema


def _grammar(loaded: Loaded, schema: Mapping[str, Any]) -> Any:
    try:
        return json_schema(loaded.engine, schema)
    except (ValueError, ImportError) as error:
        raise ApiError(400, f"response_format: {error}", param="response_format") from error


def _speculation(name: str, value: Any) -> Drafting:
    fields = Fields(value, name)
    draft = fields.take("draft", one_of("auto", "none"), "auto")
    limits = fields.take("tree", _tree, {})
    fields.done()
    if draft == "none" and limits:
        raise ApiError(400, f'{name}.tree has no effect with draft: "none"; drop one of the two', param=name)
    return Drafting(enabled=draft == "auto", **limits)


def _tree(name: str, value: Any) -> dict[str, int]:
    fields = Fields(value, name)
    limits = {each: fields.take(each, integer(1, 1 << 20)) for each in ("depth", "nodes")}
    fields.done()
    return {each: limit for each, limit in limits.items() if limit is not None}
