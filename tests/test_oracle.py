"""The oracle: over 200 combinations of family, drafter, tree, batch and end, ids equal transformers'."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from aquiline.drafters.drafter import Drafter
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.lookahead import Lookahead
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.mixed import LookupFirst, Merged
from aquiline.drafters.parallel import ParallelDrafter
from aquiline.drafters.small_model import SmallModel
from aquiline.drafters.trees import Chain, DynamicTree, StaticTree, TreePolicy
from aquiline.engine.generate import generate_requests
from aquiline.engine.request import Engine, Request
from aquiline.native.library import find_library
from aquiline.sampling import SamplingParams
from aquiline.targets.decoder import Decoder
from aquiline.targets.native import NativeDecoder, native
from aquiline.targets.target import Target
from tests import tiny
from tests.conftest import runs_kernels
from tests.drafters import taught
from tests.drafters.loop import noisy
from tests.knowing_drafter import KnowingDrafter, known_from

pytestmark = pytest.mark.oracle
kernels = pytest.mark.skipif(not runs_kernels(), reason="no kernels were asked for")

SEEDS = {
    "llama": 4,
    "llama3": 53,
    "llama-linear": 37,
    "llama-yarn": 20,
    "llama-bias-tied": 2,
    "mistral": 96,
    "qwen2": 0,
    "qwen3": 8,
    "smollm3": 8,
}
"""Of each family's first prompt: its greedy answer repeats itself early enough for prompt lookup and Lookahead,
in float64 and on the kernels."""

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
def prompts(family: str) -> list[list[int]]:
    return [tiny.prompts(3, seed=SEEDS[family], longest=28)[0], *tiny.prompts(3, seed=11, longest=28)[1:]]


@cache
def reference(family: str, index: int) -> tuple[int, ...]:
    """LENGTH greedy ids of transformers after prompt `index`, in float64."""
    ids = torch.tensor([prompts(family)[index]])
    model = tiny.hf_model(family)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False, pad_token_id=0
    )
    return tuple(out[0, ids.shape[1] :].tolist())


@cache
def ends(family: str) -> tuple[int, int]:
    """Tokens that end the first two texts, in the second half of each."""
    first, second = reference(family, 0), reference(family, 1)
    end = next(token for i, token in enumerate(first) if i >= 12 and token not in first[:i])
    return end, next(token for i, token in enumerate(second) if i >= 15 and token not in (*second[:i], *first[:12]))


Texts = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""(Prompt, answer) pairs: what a drafter knows, so that it is right often enough."""


Make = Callable[[Target, Texts, TreePolicy], Drafter | None]


@cache
def greedy(family: str) -> Texts:
    return tuple((tuple(prompt), reference(family, i)) for i, prompt in enumerate(prompts(family)))


def knowing(texts: Texts, branches: int) -> KnowingDrafter:
    known = known_from([[*prompt, *answer] for prompt, answer in texts])
    return KnowingDrafter(known, tiny.VOCAB, error=0.3, branches=branches, depth=4)


eagle_head, parallel_heads = cache(taught.eagle_head), cache(taught.parallel_heads)

TEACHERS: dict[int, Decoder] = {}
"""id of a native target → the same weights in float64, for heads that are fitted to it."""


@cache
@torch.inference_mode(False)  # what is cached must serve every test
def native_target(family: str, dtype: torch.dtype) -> NativeDecoder:
    rounded = deepcopy(tiny.decoder(family)).to(dtype)
    copy = native(rounded)
    assert copy is not None, find_library()[1]
    TEACHERS[id(copy)] = rounded.double()
    return copy


def eagle(kind: str) -> Make:
    def make(target: Target, texts: Texts, tree: TreePolicy) -> Drafter:
        head = eagle_head(kind, TEACHERS.get(id(target), target), texts)
        head = replace(head, network=deepcopy(head.network).to(target.dtype))
        return EagleDrafter(head, target, tree, packed=isinstance(target, NativeDecoder))

    return make


def parallel(kind: str) -> Make:
    def make(target: Target, texts: Texts, tree: TreePolicy) -> Drafter:
        heads = parallel_heads(kind, TEACHERS.get(id(target), target), texts)
        return ParallelDrafter(replace(heads, network=deepcopy(heads.network).to(target.dtype)), target)

    return make


def lookup_first(target: Target, texts: Texts, tree: TreePolicy) -> Drafter:
    return LookupFirst(PromptLookup(min_ngram=1), eagle("eagle3")(target, texts, tree))


def merged(target: Target, texts: Texts, tree: TreePolicy) -> Drafter:
    return Merged(eagle("eagle")(target, texts, Chain(3)), PromptLookup(min_ngram=1, num_branches=2))


def small_model(target: Target) -> Drafter:
    return SmallModel(noisy(TEACHERS.get(id(target), target), 0.03), target, Chain(3))


# Name → (does it take a tree policy, how it is made).
DRAFTERS: dict[str, tuple[bool, Make]] = {
    "plain": (False, lambda target, texts, tree: None),
    "knowing-chain": (False, lambda target, texts, tree: knowing(texts, 1)),
    "knowing-tree": (False, lambda target, texts, tree: knowing(texts, 3)),
    "eagle": (True, eagle("eagle")),
    "eagle3": (True, eagle("eagle3")),
    "medusa": (False, parallel("medusa")),
    "hydra": (False, parallel("hydra")),
    "lookup": (False, lambda target, texts, tree: PromptLookup(min_ngram=1, num_branches=3)),
    "lookahead": (False, lambda target, texts, tree: Lookahead(window=3, ngram=3, guesses=3)),
    "small-model": (
        False,
        lambda target, texts, tree: small_model(target),
    ),
    "lookup-first": (True, lookup_first),
    "merged": (False, merged),
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
    return compare(case, tiny.decoder(case.family), greedy(case.family))


def compare(
    case: Combination, target: Target, texts: Texts
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[tuple[int, int]]]:
    """As `run`, for any target and its own greedy answers."""
    last = ends(case.family) if case.end != "budget" else ()
    drafter = DRAFTERS[case.drafter][1](target, texts, TREES.get(case.tree, Chain(1)))
    engine = Engine(target, drafter, None, last if case.end == "eos" else (), max_rows=case.batch)
    params = SamplingParams(max_new_tokens=LENGTH, stop_token_ids=last if case.end == "stop-ids" else ())
    outputs = generate_requests(engine, [Request(prompt, params) for prompt, _ in texts[: case.batch]])
    expected = []
    for _, text in texts[: case.batch]:
        cut = next((i + 1 for i, token in enumerate(text) if token in last), len(text))
        expected.append(text[:cut])
    counts = [(output.stats.accepted, output.stats.nodes) for output in outputs]
    return [tuple(output.token_ids) for output in outputs], expected, counts


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_ids_equal_those_of_transformers(family: str) -> None:
    cases = [case for case in combinations() if case.family == family]
    assert len(cases) >= 12
    with torch.inference_mode():
        for case in cases:
            ours, expected, counts = run(case)
            assert ours == expected, str(case)
            assert_both(case, counts)


def assert_both(case: Combination, counts: list[tuple[int, int]]) -> None:
    """Drafts were accepted and rejected, or nothing was tried."""
    accepted, nodes = (sum(column) for column in zip(*counts, strict=True))
    if case.drafter == "plain":
        assert nodes == 0
    else:
        assert 0 < accepted < nodes, f"{case}: accepted {accepted} of {nodes} nodes; both must happen"


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_ids_on_the_kernels_equal_those_of_plain_decoding(family: str, dtype: torch.dtype) -> None:
    """Trees in bfloat16, too: a quarter of the sample in each dtype."""
    target = native_target(family, dtype)
    params = SamplingParams(max_new_tokens=LENGTH)
    plain = generate_requests(Engine(target, None, None, ()), [Request(prompt, params) for prompt in prompts(family)])
    texts = tuple((tuple(p), tuple(out.token_ids)) for p, out in zip(prompts(family), plain, strict=True))
    cases = [case for case in combinations() if case.family == family][dtype == torch.bfloat16 :: 3]
    with torch.inference_mode():
        for case in cases:
            ours, expected, counts = compare(case, target, texts)
            assert ours == expected, str(case)
            assert_both(case, counts)


def test_the_sample_covers_every_drafter_tree_batch_and_end() -> None:
    cases = combinations()
    assert len(cases) == len(set(cases)) >= 200
    assert {case.drafter for case in cases} == set(DRAFTERS)
    assert {case.tree for case in cases} == {*TREES, "own"}
    assert {(case.batch, case.end) for case in cases} == {(b, e) for b in (1, 3) for e in ("budget", "eos", "stop-ids")}


def test_the_greedy_texts_vary() -> None:
    for family in tiny.FAMILIES:
        assert len({token for _, answer in greedy(family) for token in answer}) >= 20


SAMPLED = {
    "temperature": SamplingParams(max_new_tokens=LENGTH, temperature=0.5, seed=0),
    "top-k": SamplingParams(max_new_tokens=LENGTH, temperature=1.0, top_k=20, seed=6),
    "top-p": SamplingParams(max_new_tokens=LENGTH, temperature=1.2, top_p=0.8, min_p=0.02, seed=0),
    "penalties": SamplingParams(
        max_new_tokens=LENGTH, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.2, seed=31
    ),
}


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "plain"])
@pytest.mark.parametrize("params", SAMPLED)
def test_seeded_sampling_equals_seeded_plain_decoding(name: str, params: str) -> None:
    accepted, nodes = sample(tiny.decoder("qwen3"), name, SAMPLED[params])
    assert 0 < accepted < nodes, f"accepted {accepted} of {nodes} nodes; both must happen"


@kernels
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_seeded_sampling_on_the_kernels(name: str, dtype: torch.dtype) -> None:
    # Lookup and Lookahead draft repetitions: with this seed, the text has some in both dtypes.
    accepted, nodes = sample(native_target("qwen3", dtype), name, replace(SAMPLED["temperature"], seed=1))
    assert 0 < accepted < nodes, f"accepted {accepted} of {nodes} nodes; both must happen"


def sample(target: Target, name: str, params: SamplingParams) -> tuple[int, int]:
    """Compares a drafter with plain decoding; returns (accepted, nodes)."""
    family = "qwen3"
    requests = [Request(prompt, params) for prompt in prompts(family)]
    plain = generate_requests(Engine(target, None, None, (), max_rows=1), requests)
    # Heads that know the sampled texts, so that drafts are accepted here too.
    texts = tuple(
        (tuple(prompt), tuple(output.token_ids)) for prompt, output in zip(prompts(family), plain, strict=True)
    )
    with torch.inference_mode():
        drafter = DRAFTERS[name][1](target, texts, TREES["dynamic"])
    ours = generate_requests(Engine(target, drafter, None, (), max_rows=3), requests)
    assert [output.token_ids for output in ours] == [output.token_ids for output in plain]
    accepted, nodes = (sum(getattr(output.stats, name) for output in ours) for name in ("accepted", "nodes"))
    return accepted, nodes


def test_a_drafter_that_knows_gives_depth_plus_one_and_one_that_never_does_gives_one() -> None:
    family, depth = "llama", 4
    texts = [[*prompt, *answer] for prompt, answer in greedy(family)]
    request = [Request(prompts(family)[0], SamplingParams(max_new_tokens=1 + 3 * (depth + 1)))]
    for error, expected in ((0.0, depth + 1.0), (1.0, 1.0)):
        drafter = KnowingDrafter(known_from(texts), tiny.VOCAB, error=error, depth=depth, branches=2)
        stats = generate_requests(Engine(tiny.decoder(family), drafter, None, ()), request)[0].stats
        assert stats.mean_accept_length == expected
