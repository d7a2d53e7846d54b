"""Hundreds of random requests to SmolLM2 with its heads: every output is plain decoding's.

The tiny fuzz knows the right answer of each request; here plain decoding is it. Every drafter and tree
in float32 and, on the native kernels, in bfloat16.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import aquiline
from aquiline import Chain, DynamicTree, PromptLookup, SamplingParams, StaticTree
from aquiline.drafters.adaptive import Adaptive
from aquiline.drafters.drafter import Drafter
from aquiline.drafters.lookahead import Lookahead
from aquiline.engine.drafting import make_drafter
from aquiline.engine.generate import generate_requests, stream_requests
from aquiline.engine.grammar import json_schema, lark, regex
from aquiline.engine.request import Engine, GenerationOutput, Request
from aquiline.engine.text import encode_prompt
from tests.conftest import runs_kernels

pytestmark = [pytest.mark.real, pytest.mark.verify, pytest.mark.usefixtures("both_cores")]

PROMPTS = (
    "Why is the sky blue?",
    "Write a python function that sorts a list. " * 4,
    "List: 1, 2, 3, 4, 5, 6",
    "Hi",
    "Répète: naïve café, 日本語, 😀😀😀",
    "Repeat after me: abc abc abc abc abc abc",
    "Give me a JSON object with name and age.",
    "Tell a story about a dragon named Ember who lived by the sea. " * 12,
)
STOPS = ("the", ".", " and", "\n", "\n\n", "a", "é", "is the", ", ", "```", "def", "sky", "😀")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
KINDS = ("chain", "eagle chain", "auto", "lookup", "dynamic", "static", "lookahead")


def make(loaded: aquiline.Loaded, kind: str, rng: random.Random) -> Drafter:
    depth, least = rng.randrange(1, 6), rng.choice((0.0, 0.0, 0.15))

    def head(name: str, tree: Any = None) -> Drafter:
        drafter = make_drafter(name, tree, loaded.target, loaded.target_path).drafter
        assert drafter is not None
        return drafter

    either = rng.choice(("smollm2-eagle3", "smollm2-eagle"))
    makers: dict[str, Callable[[], Drafter]] = {
        "chain": lambda: head("smollm2-eagle3", Chain(depth, least)),
        "eagle chain": lambda: head("smollm2-eagle", Chain(depth, least)),
        "auto": lambda: Adaptive(head("auto")) if rng.random() < 0.5 else head("auto"),
        "lookup": lambda: PromptLookup(depth=depth, min_ngram=rng.choice((1, 2))),
        "dynamic": lambda: head(either, DynamicTree(rng.choice((6, 12, 20)), rng.choice((2, 3, 5)), 4, least)),
        "static": lambda: head(either, StaticTree()),
        "lookahead": Lookahead,
    }
    return makers[kind]()


def random_params(engine: Engine, rng: random.Random) -> SamplingParams:
    def sometimes(value: Any, otherwise: Any, chance: float = 0.2) -> Any:
        return value if rng.random() < chance else otherwise

    vocabulary = engine.target.shape.vocab_size
    longest = rng.choice((1, 3, 8, 16, 24, 40))
    grammars = (
        lambda: json_schema(engine, SCHEMA),
        lambda: regex(engine, r"[A-Z][a-z ]{5,40}\."),
        lambda: lark(engine, 'start: item ("," item)*\nitem: /[a-z]+/ "=" /[0-9]+/'),
    )
    biased = rng.random() < 0.2
    return SamplingParams(
        max_new_tokens=longest,
        temperature=rng.choice((0.0, 0.0, 0.7, 1.0, 1.5)),
        top_k=sometimes(rng.choice((1, 5, 50)), 0),
        top_p=sometimes(rng.choice((0.5, 0.9)), 1.0),
        min_p=sometimes(0.05, 0.0),
        seed=rng.randrange(10**6),
        repetition_penalty=sometimes(rng.choice((1.1, 1.3)), 1.0),
        presence_penalty=sometimes(0.5, 0.0),
        frequency_penalty=sometimes(0.3, 0.0),
        logit_bias={rng.randrange(vocabulary): rng.choice((-5.0, 5.0)) for _ in range(3)} if biased else {},
        min_new_tokens=sometimes(min(longest, 5), 0),
        stop=tuple(rng.sample(STOPS, rng.randrange(1, 3))) if rng.random() < 0.35 else (),
        stop_token_ids=sometimes((rng.randrange(vocabulary), 28), (), 0.1),
        ignore_eos=rng.random() < 0.2,
        logprobs=sometimes(rng.randrange(4), None),
        n=sometimes(rng.choice((2, 3)), 1),
        logits_processors=(rng.choice(grammars)(),) if rng.random() < 0.15 else (),
    )


def streamed(engine: Engine, requests: list[Request]) -> list[GenerationOutput]:
    """The outputs of a stream, whose pieces join to their texts."""
    texts: dict[tuple[int, int], str] = {}
    outputs: dict[tuple[int, int], GenerationOutput] = {}
    for event in stream_requests(engine, requests):
        key = event.index, event.sample
        texts[key] = texts.get(key, "") + event.text
        if event.output is not None:
            outputs[key] = event.output
    assert texts == {key: output.text for key, output in outputs.items()}
    return [outputs[key] for key in sorted(outputs)]


def fuzz(loaded: aquiline.Loaded, kinds: tuple[str, ...], calls: int, seed: int) -> tuple[int, int]:
    """Compares random requests with plain decoding; returns how many drafts were accepted and refused."""
    accepted = refused = 0
    for number in range(seed, seed + calls):
        rng = random.Random(number)
        kind = kinds[number % len(kinds)]
        requests = [
            Request(
                encode_prompt(loaded.engine.tokenizer, rng.choice(PROMPTS), raw=rng.random() < 0.3),
                random_params(loaded.engine, rng),
            )
            for _ in range(rng.choice((1, 1, 2, 3, 5)))
        ]
        engine = replace(loaded.engine, drafter=make(loaded, kind, rng), max_rows=rng.choice((1, 2, 3, 8)))
        expected = generate_requests(replace(loaded.engine, max_rows=rng.choice((1, 8))), requests)
        for plain, ours in zip(expected, streamed(engine, requests), strict=True):
            where = f"call {number}, {kind}, {engine.max_rows} rows"
            assert ours.token_ids == plain.token_ids, where
            assert (ours.text, ours.finish_reason) == (plain.text, plain.finish_reason), where
            assert ours.logprobs == pytest.approx(plain.logprobs, abs=1e-3), where
            accepted += ours.stats.accepted
            refused += ours.stats.nodes - ours.stats.accepted
    return accepted, refused


@pytest.mark.timeout(3000)
def test_everything_in_bfloat16(smollm2_folder: object) -> None:
    if not runs_kernels():
        pytest.skip("only the native kernels keep the bits")
    accepted, refused = fuzz(aquiline.load("smollm2", None, dtype="bfloat16"), KINDS, 120, 0)
    assert accepted > 120 and refused > 120, "drafts must be both right and wrong, or nothing was tried"


@pytest.mark.timeout(3000)
def test_everything_in_float32(smollm2_folder: object) -> None:
    accepted, refused = fuzz(aquiline.load("smollm2", None, dtype="float32"), KINDS, 120, 5000)
    assert accepted > 120 and refused > 120, "drafts must be both right and wrong, or nothing was tried"
