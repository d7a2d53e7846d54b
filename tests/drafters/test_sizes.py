"""Trees that would not fit at the end of a context are refused when they are made, not after thousands of tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from aquiline import tree as trees
from aquiline.cache import MOST_NODES, SCRATCH
from aquiline.drafters.drafter import Committed, Needs, Rows
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.lookahead import Lookahead
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.mixed import Merged
from aquiline.drafters.trees import Chain, DynamicTree, StaticTree
from aquiline.engine.generate import generate_requests
from aquiline.engine.request import Engine, Request
from aquiline.sampling import SamplingParams
from aquiline.targets.attention import place
from tests import tiny

CONTEXT = 256


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DynamicTree(MOST_NODES + 1, 4, 30), ("num_nodes 961 takes 961", "lower num_nodes")),
        (lambda: DynamicTree(60, 6, 200), ("top_k 200", "5 levels", "takes 1000", "lower top_k or depth")),
        (lambda: StaticTree(tuple((i,) for i in range(2000))), ("2000 paths takes 2001", "fewer paths")),
        (lambda: Chain(5000), ("chain depth 5000 takes 5001", "lower depth")),
        (lambda: PromptLookup(depth=500, num_branches=2), ("2 × 500 tokens takes 1001", "lower depth or num_branches")),
        (lambda: Lookahead(window=300, ngram=5), ("window 300, ngram 5, guesses 7 takes 1229", "lower one of them")),
        (lambda: Merged(PromptLookup(), PromptLookup(), 2000), ("num_nodes is 2000", f"2 … {MOST_NODES}")),
    ],
)
def test_too_large_a_tree_names_value_limit_and_remedy(make: Callable[[], Any], words: Sequence[str]) -> None:
    with pytest.raises(ValueError, match="".join(f"(?=.*{re.escape(word)})" for word in (*words, str(MOST_NODES)))):
        make()


@pytest.mark.parametrize("settings", [{"depth": 1.5}, {"max_ngram": "x"}])
def test_sizes_of_lookup_are_integers(settings: dict[str, Any]) -> None:
    (name, value) = next(iter(settings.items()))
    with pytest.raises(TypeError, match=rf"{name} is {value!r}; allowed: an integer"):
        PromptLookup(**settings)


def test_drafts_that_fit_are_accepted() -> None:
    assert DynamicTree(MOST_NODES, 4, 30).num_nodes == MOST_NODES
    assert Chain(MOST_NODES - 1).depth == PromptLookup(depth=MOST_NODES - 1).depth == MOST_NODES - 1


def test_the_longest_chain_of_a_head_ends_with_the_context() -> None:
    target = tiny.decoder("qwen3")
    request = [Request([5, 6, 7], SamplingParams(max_new_tokens=8))]
    drafter = EagleDrafter(tiny.head("eagle3"), target, Chain(MOST_NODES - 1))
    plain = generate_requests(Engine(target, None, None, ()), request)[0]
    assert generate_requests(Engine(target, drafter, None, ()), request)[0].token_ids == plain.token_ids


class Bushy:
    """Drafts MOST_NODES nodes while two levels are left, whatever it costs."""

    needs = Needs()

    def __init__(self, nodes: int) -> None:
        self.nodes, self.widths = nodes, list[int]()

    def new_state(self, slots: int, capacity: int) -> None:
        return None

    def extend(self, committed: Committed, state: None) -> None:
        """Needs nothing."""

    def propose(self, rows: Rows, state: None) -> trees.DraftTree:
        wide = range(min(tiny.VOCAB, self.nodes))
        tokens, parents = [*rows.roots, *wide], [-1, *(0 for _ in wide)]
        if rows.depth(2) > 1:
            below = [(parent, token) for parent in wide for token in range(tiny.VOCAB)][: self.nodes - len(tokens)]
            tokens += [token for _, token in below]
            parents += [1 + parent for parent, _ in below]
        self.widths.append(len(tokens))
        return trees.from_lists([(tokens, parents)])

    def copy(self, source: int, slot: int, length: int, state: None) -> None:
        """Keeps nothing."""

    def reset(self, slot: int, length: int, state: None) -> None:
        """Keeps nothing."""


def test_the_largest_tree_fits_at_the_end_of_the_context() -> None:
    target, drafter = tiny.decoder("qwen3"), Bushy(MOST_NODES)
    prompt = (tiny.prompts(1, seed=2)[0] * CONTEXT)[: CONTEXT - 5]
    request = [Request(prompt, SamplingParams(max_new_tokens=CONTEXT))]
    plain = generate_requests(Engine(target, None, None, ()), request)[0]
    ours = generate_requests(Engine(target, drafter, None, ()), request)[0]
    assert (ours.token_ids, ours.finish_reason) == (plain.token_ids, "length")
    assert len(ours.token_ids) == 5 and max(drafter.widths) == MOST_NODES and ours.stats.accepted > 0
    with pytest.raises(ValueError, match=f"is {CONTEXT}, .*{SCRATCH} .*draft smaller trees"):
        generate_requests(Engine(target, Bushy(SCRATCH + 8), None, ()), request)


@pytest.mark.parametrize("context", [256, 1000, 1023])
def test_whole_blocks_of_slots_fit_after_any_context(context: int) -> None:
    cache = tiny.decoder("qwen3").new_cache(1, 8)
    cache.max_capacity = context
    cache.lengths[0] = context - 1
    assert place(cache, [0], MOST_NODES, bucket=64).span <= cache.capacity <= context + SCRATCH
