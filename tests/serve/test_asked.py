"""Bodies of every kind: an answer or a refusal, never a failure of the server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from tests.serve.serving import Running, path_model, serving

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NUMBER = st.integers(-2, 40) | st.floats(-3, 3, allow_nan=False) | st.sampled_from([1e308, 5e-324, 2**63, -(2**64)])

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["tiny", "other"]),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": st.text(max_size=9) | JSON}
        ),
        max_size=3,
    ),
    "prompt": st.text(max_size=12) | st.lists(st.integers(-1, 300), max_size=4) | st.lists(st.text(max_size=4)),
    "max_tokens": st.integers(0, 12),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 1),
    "top_k": st.integers(-1, 300),
    "n": st.integers(1, 3),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=2), max_size=3),
    "logit_bias": st.dictionaries(st.integers(-1, 400).map(str), st.floats(-100, 100), max_size=3),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0, 3) | st.just(1e-300),
    "logprobs": st.booleans() | st.integers(0, 21),
    "top_logprobs": st.integers(0, 21),
    "echo": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "response_format": st.sampled_from([{"type": "json_object"}, {"type": "text"}, {"type": "json_schema"}]),
    "prediction": st.fixed_dictionaries({"type": st.just("content"), "content": st.text(max_size=12)}),
    "speculation": st.sampled_from([{"draft": "none"}, {"tree": {"depth": 1}}, {"tree": {"nodes": 2}}]),
    "provenance": st.booleans(),
    "min_tokens": st.integers(0, 9),
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.lists(st.integers(0, 300), max_size=2),
}


@st.composite
def bodies(draw: st.DrawFn, need: str) -> dict[str, Any]:
    """Mostly right, with up to two fields of any kind."""
    names = draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=5))
    body = {name: draw(VALUES[name]) for name in [need, "max_tokens", *names]}
    for name in draw(st.lists(st.sampled_from(sorted(VALUES)) | st.text(max_size=6), max_size=2)):
        body[name] = draw(JSON | NUMBER)
    return body


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    logger = logging.getLogger("aquiline")
    before = logger.level
    logger.setLevel(logging.ERROR)
    with serving(path_model(), timeout=20.0) as running:
        yield running
    logger.setLevel(before)


@pytest.mark.parametrize(("path", "need"), [("chat/completions", "messages"), ("completions", "prompt")])
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_body_makes_it_fail(server: Running, path: str, need: str, data: st.DataObject) -> None:
    status, _, answer = server.ask(f"/v1/{path}", data.draw(bodies(need)))
    assert status in (200, 400, 404) and "server_error" not in str(answer), answer
    if status != 200:
        assert answer["error"]["message"] and set(answer["error"]) == {"message", "type", "param", "code"}


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(raw=st.binary(max_size=40) | JSON, path=st.sampled_from(["tokenize", "detokenize", "v1/completions"]))
def test_no_bytes_make_it_fail(server: Running, raw: Any, path: str) -> None:
    assert server.ask(f"/{path}", raw if isinstance(raw, bytes) else raw or {})[0] in (200, 400)


def test_nothing_is_left_behind(server: Running) -> None:
    """Runs last in this file: after all of the above no slot is held, and the next request is answered."""
    server.until(lambda: server.scheduler.running == server.scheduler.waiting == 0)
    assert (server.scheduler.running, server.scheduler.waiting) == (0, 0)
    status, _, answer = server.ask("/v1/completions", {"prompt": "x", "max_tokens": 2})
    assert status == 200 and answer["usage"]["completion_tokens"] == 2
