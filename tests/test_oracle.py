"""The oracle: over 200 combinations of family, drafter, tree, batch and end, ids equal transformers'."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from aquiline.drafters.drafter import Drafter
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.lookahead import Lookahead
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.mixed import LookupFirst, Merged
from aquiline.drafters.small_model import SmallModel
from aquiline.drafters.trees import Chain, DynamicTree, StaticTree, TreePolicy
from aquiline.engine.generate import generate_requests
from aquiline.engine.request import Engine, Request
from aquiline.sampling import SamplingParams
from tests import tiny
from tests.knowing_drafter import KnowingDrafter, known_from

pytestmark = pytest.mark.oracle

PROMPTS = tiny.prompts(3, seed=11, longest=28)
LENGTH = 22
COMBINATIONS = 216

TREES: dict[str, TreePolicy] = {
    "chain": Chain(4),
    "cautious-chain": Chain(5, min_prob=0.05),
    "static": StaticTree(),
    "dynamic": DynamicTree(num_nodes=12, depth=4, top_k=3),
    "pruned": DynamicTree(num_nodes=8, depth=3, top_k=2, min_prob=0.01),
}


@cache
def reference(family: str, index: int) -> tuple[int, ...]:
    """LENGTH greedy ids of transformers after prompt `index`, in float64."""
    ids = torch.tensor([PROMPTS[index]])
    model = tiny.hf_model(family)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False, pad_token_id=0
    )
    return tuple(out[0, ids.shape[1] :].tolist())


def knowing(family: str, branches: int) -> KnowingDrafter:
    texts = [[*prompt, *reference(family, i)] for i, prompt in enumerate(PROMPTS)]
    return KnowingDrafter(known_from(texts), tiny.VOCAB, error=0.3, branches=branches, depth=4)


def eagle(kind: str) -> Callable[[str, TreePolicy], Drafter]:
    return lambda family, tree: EagleDrafter(tiny.head(kind), tiny.decoder(family), tree)


# Name → (does it take a tree policy, how it is made).
DRAFTERS: dict[str, tuple[bool, Callable[[str, TreePolicy], Drafter | None]]] = {
    "plain": (False, lambda family, tree: None),
    "knowing-chain": (False, lambda family, tree: knowing(family, 1)),
    "knowing-tree": (False, lambda family, tree: knowing(family, 3)),
    "eagle": (True, eagle("eagle")),
    "eagle3": (True, eagle("eagle3")),
    "lookup": (False, lambda family, tree: PromptLookup(min_ngram=1, num_branches=3)),
    "lookahead": (False, lambda family, tree: Lookahead(window=3, ngram=3, guesses=3)),
    "small-model": (False, lambda family, tree: SmallModel(tiny.decoder("llama"), tiny.decoder(family), Chain(3))),
    "lookup-first": (True, lambda family, tree: LookupFirst(PromptLookup(min_ngram=1), eagle("eagle3")(family, tree))),
    "merged": (
        False,
        lambda family, tree: Merged(knowing(family, 2), PromptLookup(min_ngram=1, num_branches=2)),
    ),
}


@dataclass(frozen=True)
class Combination:
    """One case; its name says all of it."""

    family: str
    drafter: str
    tree: str
    batch: int
    end: str

    def __str__(self) -> str:
        return f"{self.family}-{self.drafter}-{self.tree}-B{self.batch}-{self.end}"


def combinations() -> list[Combination]:
    """A fixed random sample of the product, without repeats."""
    everything = [
        Combination(family, drafter, tree, batch, end)
        for family in tiny.FAMILIES
        for drafter, (takes_tree, _) in DRAFTERS.items()
        for tree in (TREES if takes_tree else ["own"])
        for batch in (1, 3)
        for end in ("budget", "eos", "stop-ids")
    ]
    return random.Random(0).sample(everything, COMBINATIONS)


def run(case: Combination) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[tuple[int, int]]]:
    """Returns (what we emitted, what transformers emits, per row (accepted, nodes))."""
    texts = [reference(case.family, i) for i in range(len(PROMPTS))]
    ends = {texts[0][9], texts[1][15]} if case.end != "budget" else set()
    make = DRAFTERS[case.drafter][1]
    drafter = make(case.family, TREES.get(case.tree, Chain(1)))
    end_ids = tuple(ends) if case.end == "eos" else ()
    engine = Engine(tiny.decoder(case.family), drafter, None, end_ids, max_rows=case.batch)
    stops = tuple(ends) if case.end == "stop-ids" else ()
    params = SamplingParams(max_new_tokens=LENGTH, stop_token_ids=stops)
    prompts = PROMPTS[: case.batch]
    outputs = generate_requests(engine, [Request(prompt, params) for prompt in prompts])
    expected = []
    for text in texts[: case.batch]:
        cut = next((i + 1 for i, token in enumerate(text) if token in ends), len(text))
        expected.append(text[:cut])
    counts = [(output.stats.accepted, output.stats.nodes) for output in outputs]
    return [tuple(output.token_ids) for output in outputs], expected, counts


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_ids_equal_those_of_transformers(family: str) -> None:
    cases = [case for case in combinations() if case.family == family]
    accepted = rejected = 0
    with torch.inference_mode():
        for case in cases:
            ours, expected, counts = run(case)
            assert ours == expected, str(case)
            accepted += sum(a for a, _ in counts)
            rejected += sum(nodes - a for a, nodes in counts)
    assert len(cases) >= 12
    assert accepted > 0 and rejected > 0, "both acceptance and rejection must have happened"


def test_the_sample_covers_every_drafter_tree_batch_and_end() -> None:
    cases = combinations()
    assert len(cases) == len(set(cases)) >= 200
    assert {case.drafter for case in cases} == set(DRAFTERS)
    assert {case.tree for case in cases} == {*TREES, "own"}
    assert {(case.batch, case.end) for case in cases} == {(b, e) for b in (1, 3) for e in ("budget", "eos", "stop-ids")}


def test_the_greedy_texts_vary() -> None:
    for family in tiny.FAMILIES:
        assert len({token for i in range(len(PROMPTS)) for token in reference(family, i)}) >= 20


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "plain"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=LENGTH, temperature=0.5, seed=3),
        SamplingParams(max_new_tokens=LENGTH, temperature=1.0, top_k=20, seed=4),
        SamplingParams(max_new_tokens=LENGTH, temperature=1.2, top_p=0.8, min_p=0.02, seed=5),
        SamplingParams(max_new_tokens=LENGTH, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.2, seed=6),
    ],
    ids=["temperature", "top-k", "top-p", "penalties"],
)
def test_seeded_sampling_equals_seeded_plain_decoding(name: str, params: SamplingParams) -> None:
    family = "qwen3"
    requests = [Request(prompt, params) for prompt in PROMPTS]
    plain = generate_requests(Engine(tiny.decoder(family), None, None, (), max_rows=1), requests)
    # Drafters that know the sampled text, so that drafts are accepted here too.
    texts = [[*prompt, *output.token_ids] for prompt, output in zip(PROMPTS, plain, strict=True)]
    if name.startswith("knowing"):
        drafter: Drafter | None = KnowingDrafter(known_from(texts), tiny.VOCAB, error=0.3, branches=2)
    else:
        drafter = DRAFTERS[name][1](family, TREES["dynamic"])
    ours = generate_requests(Engine(tiny.decoder(family), drafter, None, (), max_rows=3), requests)
    assert [output.token_ids for output in ours] == [output.token_ids for output in plain]
    if name.startswith("knowing"):
        assert sum(output.stats.accepted for output in ours) > 5


def test_a_drafter_that_knows_gives_depth_plus_one_and_one_that_never_does_gives_one() -> None:
    family, depth = "llama", 4
    texts = [[*prompt, *reference(family, i)] for i, prompt in enumerate(PROMPTS)]
    request = [Request(PROMPTS[0], SamplingParams(max_new_tokens=1 + 3 * (depth + 1)))]
    for error, expected in ((0.0, depth + 1.0), (1.0, 1.0)):
        drafter = KnowingDrafter(known_from(texts), tiny.VOCAB, error=error, depth=depth, branches=2)
        stats = generate_requests(Engine(tiny.decoder(family), drafter, None, ()), request)[0].stats
        assert stats.mean_accept_length == expected
