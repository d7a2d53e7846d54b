"""Thousands of random requests against the slow loop: no mismatch, no leaked slot."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from aquiline.drafters.lookup import PromptLookup
from aquiline.engine import generate
from aquiline.engine.batch import Batch
from aquiline.engine.generate import stream_requests
from aquiline.engine.request import Engine, Request, StreamEvent
from aquiline.sampling import SamplingParams
from tests.knowing_drafter import KnowingDrafter, known_from
from tests.path_target import PathTarget, fingerprint
from tests.reference.slow_generate import SlowOutput, slow_generate
from tests.tiny_tokenizers import byte_fallback, byte_level

CONTEXT = 40
STOPS = ("a", "ab", "ba", "aab", "abc", "b a", "!?", "é", "€b", "\n\n", " the", "c.", "aaa", "bab", "\ufffd")


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Every batch that a stream makes."""
    made: list[Batch] = []

    def recorded(*args: Any) -> Batch:
        made.append(Batch(*args))
        return made[-1]

    monkeypatch.setattr(generate, "Batch", recorded)
    return made


def random_params(rng: random.Random, vocabulary: int) -> SamplingParams:
    def sometimes(value: Any, otherwise: Any, chance: float = 0.2) -> Any:
        return value if rng.random() < chance else otherwise

    longest = sometimes(0, rng.choice((1, 2, 5, 12, 30, 60)), 0.03)
    return SamplingParams(
        max_new_tokens=longest,
        temperature=rng.choice((0.0, 0.0, 0.7, 1.3)),
        top_k=sometimes(5, 0),
        top_p=sometimes(0.8, 1.0),
        min_p=sometimes(0.05, 0.0),
        seed=rng.randrange(1000),
        repetition_penalty=sometimes(1.3, 1.0),
        presence_penalty=sometimes(0.5, 0.0),
        frequency_penalty=sometimes(0.4, 0.0),
        logit_bias=sometimes({rng.randrange(vocabulary): rng.uniform(-4, 4)}, {}),
        min_new_tokens=sometimes(min(longest, rng.randrange(6)), 0),
        stop=tuple(rng.sample(STOPS, rng.randrange(1, 4))) if rng.random() < 0.5 else (),
        stop_token_ids=sometimes((rng.randrange(vocabulary),), ()),
        ignore_eos=rng.random() < 0.1,
        logprobs=sometimes(rng.randrange(3), None, 0.1),
    )


def random_request(rng: random.Random, vocabulary: int, shared: list[int]) -> Request:
    params = random_params(rng, vocabulary)
    longest = CONTEXT - max(1, params.min_new_tokens)
    size = rng.choice((1, 2, 5, 12, longest))
    head = shared if rng.random() < 0.3 else []
    tokens = [*head, *(rng.randrange(vocabulary) for _ in range(size))][:longest]
    return Request(tokens, params)


class Fuzz:
    """One tokenizer's target and drafters, and requests with their right answers."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        self.vocabulary = len(tokenizer)
        self.target = PathTarget(self.vocabulary, CONTEXT, seed=seed)
        self.ends = (0, 7)
        self.shared = [self.rng.randrange(self.vocabulary) for _ in range(12)]

    def answer(self, request: Request) -> SlowOutput:
        return slow_generate(
            self.target.logits,
            request.tokens,
            request.params,
            seed=request.params.seed or 0,
            max_positions=CONTEXT,
            end_ids=self.ends,
            tokenizer=self.tokenizer,
        )

    def engine(self, requests: list[Request], answers: list[SlowOutput]) -> Engine:
        texts = [[*r.tokens, *a.endless] for r, a in zip(requests, answers, strict=True)]
        featured = self.rng.random() < 0.5
        knowing = KnowingDrafter(
            known_from(texts),
            self.vocabulary,
            depth=self.rng.randrange(1, 7),
            error=self.rng.choice((0.0, 0.3, 1.0)),
            branches=self.rng.randrange(1, 4),
            features=(0,) if featured else (),
            check=_right_feature,
        )
        drafter = self.rng.choice((None, knowing, knowing, knowing, PromptLookup(depth=3, min_ngram=1)))
        return Engine(self.target, drafter, self.tokenizer, self.ends, max_rows=self.rng.choice((1, 2, 3, 8)))


def _right_feature(text: Any, feature: Tensor) -> None:
    assert int(feature) == fingerprint(text), "a drafter was given the feature of another position"


def run(fuzz: Fuzz, batches: list[Batch]) -> Counter[str]:
    """One call: several requests, some streams abandoned half-way. Counts requests and drafts."""
    rng = fuzz.rng
    requests = [random_request(rng, fuzz.vocabulary, fuzz.shared) for _ in range(rng.randrange(1, 10))]
    answers = [fuzz.answer(request) for request in requests]
    stream = stream_requests(fuzz.engine(requests, answers), requests)
    abandon = rng.randrange(1, 12) if rng.random() < 0.15 else None
    events = _collect(stream, abandon)
    seen = Counter(requests=len(requests))
    for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        mine = [event for event in events if event.index == index]
        ids = [token for event in mine for token in event.token_ids]
        text = "".join(event.text for event in mine)
        where = f"{request.tokens} {request.params}"
        if abandon is not None and not (mine and mine[-1].output):
            assert ids == answer.token_ids[: len(ids)], where
            assert answer.text.startswith(text), where
            continue
        output = mine[-1].output
        assert output is not None and all(event.output is None for event in mine[:-1]), where
        assert (ids, text, mine[-1].finish_reason) == (answer.token_ids, answer.text, answer.finish_reason), where
        assert (output.token_ids, output.text, output.finish_reason) == (ids, text, answer.finish_reason), where
        assert output.stats.emitted == len(ids)
        seen.update(accepted=output.stats.accepted, refused=output.stats.nodes - output.stats.accepted)
    for batch in batches:
        assert batch.occupied == 0 and not batch.busy
    seen.update(batches=len(batches))
    batches.clear()
    return seen


def _collect(stream: Iterator[StreamEvent], abandon: int | None) -> list[StreamEvent]:
    events = []
    for event in stream:
        events.append(event)
        if len(events) == abandon:
            stream.close()  # type: ignore[attr-defined]
    return events


def fuzz_requests(count: int, batches: list[Batch], seed: int) -> Counter[str]:
    """Compares at least `count` requests with the slow loop, and counts what was tried."""
    seen = Counter[str]()
    while seen["requests"] < count:
        fuzz = Fuzz((byte_level(), byte_fallback())[seed % 2], seed)
        for call in range(20):
            try:
                seen += run(fuzz, batches)
            except AssertionError as error:
                error.add_note(f"seed {seed}, call {call}")
                raise
        seed += 1
    return seen


@pytest.mark.oracle
def test_random_requests(batches: list[Batch]) -> None:
    seen = fuzz_requests(600, batches, 0)
    assert min(seen[kind] for kind in ("accepted", "refused", "batches")) > 50, seen


@pytest.mark.verify
def test_ten_thousand_random_requests(batches: list[Batch]) -> None:
    seen = fuzz_requests(10_000, batches, 1000)
    assert min(seen[kind] for kind in ("accepted", "refused", "batches")) > 1000, seen


def test_the_fuzz_would_notice(batches: list[Batch]) -> None:
    """A wrong answer fails, so that the comparison is known to compare."""
    fuzz = Fuzz(byte_level(), 3)
    answer = fuzz.answer

    def wrong(request: Request) -> SlowOutput:
        right = answer(at_least_one(request))
        return replace(right, token_ids=[*right.token_ids[:-1], (right.token_ids[-1] + 1) % fuzz.vocabulary])

    fuzz.answer = wrong  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="SamplingParams"):
        for _ in range(5):
            run(fuzz, batches)


def at_least_one(request: Request) -> Request:
    return Request(request.tokens, replace(request.params, max_new_tokens=max(1, request.params.max_new_tokens)))
