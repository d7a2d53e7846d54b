"""Two drafters in one: both are accepted from, the output is plain's, and what cannot be mixed is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aquiline.drafters.adaptive import Adaptive
from aquiline.drafters.drafter import Needs
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.lookahead import Lookahead
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.mixed import LookupFirst, Merged
from aquiline.drafters.small_model import SmallModel
from aquiline.drafters.trees import Chain, DynamicTree
from aquiline.sampling import SamplingParams
from aquiline.tree import from_lists
from tests import tiny
from tests.drafters.loop import Validating, assert_equal_to_plain, extend, noisy, rows_of, run, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target(8, scale=0.2, layers=5)


def eagle(target, num_nodes=9):
    head = tiny.head("eagle3", vocab_size=8, draft_vocab_size=8)
    return EagleDrafter(replace(head, draft_to_target=None), target, DynamicTree(num_nodes, 3, 2))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9)], ids=["greedy", "sampling"]
)
def test_lookup_in_an_eagle_tree_equals_plain(target, rows, params):
    drafter = Validating(Merged(eagle(target), PromptLookup(depth=4, min_ngram=1, num_branches=2)))
    prompts = [[1, 2, 3, 1, 2], [4, 5], [7, 0, 3]][:rows]
    stats = assert_equal_to_plain(target, drafter, prompts, params)
    _, alone = run(target, eagle(target), prompts, [40 - 5 * row for row in range(rows)], params)
    assert stats.mean_accept_length > alone.mean_accept_length


def test_two_drafters_with_caches_of_their_own(target):
    drafter = Merged(SmallModel(noisy(target, 0.03), target, Chain(3)), SmallModel(noisy(target, 0.06), target))
    assert_equal_to_plain(target, drafter, [[1, 2, 3], [4, 5]], SamplingParams())


class Fixed:
    """Proposes one tree, and notes whom it was asked for."""

    def __init__(self, *rows, needs=None):
        self.tree, self.needs, self.asked = from_lists(rows), needs or Needs(), []

    def new_state(self, slots, capacity):
        return None

    def propose(self, rows, state):
        self.asked.append(rows)
        return self.tree

    def extend(self, committed, state):
        """Takes nothing in."""

    def copy(self, source, slot, length, state):
        """Keeps nothing."""

    def reset(self, slot, length, state):
        """Keeps nothing."""


def test_duplicates_are_shared_and_the_budget_cuts_the_second():
    first = Fixed(([9, 1, 2, 3], [-1, 0, 0, 1]), ([9], [-1]))
    second = Fixed(([9, 1, 3, 4], [-1, 0, 1, 2]), ([9, 5], [-1, 0]))
    merged = Merged(first, second)
    tree = merged.propose(rows_of([9], [9]), merged.new_state(2, 8))
    assert tree.tokens.tolist() == [[9, 1, 2, 3, 4], [9, 5, 0, 0, 0]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 3], [-1, 0, -1, -1, -1]]
    merged = Merged(first, second, num_nodes=4)
    tree = merged.propose(rows_of([9], [9]), merged.new_state(2, 8))
    assert tree.num_nodes.tolist() == [4, 2]
    assert tree.tokens[0].tolist() == [9, 1, 2, 3]


def test_the_other_drafter_is_asked_only_for_rows_without_a_match():
    other = Fixed(([7, 5, 6], [-1, 0, 0]))
    drafter = LookupFirst(PromptLookup(depth=2, min_ngram=2, max_ngram=2), other)
    state = drafter.new_state(4, 8)
    texts = [[1, 2, 3, 4, 1, 2], [8, 7]]
    for slot, text in ((3, texts[0]), (1, texts[1])):
        extend(drafter, state, slot, text)
    tree = drafter.propose(rows_of(*texts, slots=[3, 1], max_depth=4), state)
    (asked,) = other.asked
    assert (asked.slots, asked.texts, len(asked.choosers), asked.max_depth) == ([1], [[8, 7]], 1, 4)
    assert tree.tokens.tolist() == [[2, 3, 4], [7, 5, 6]]
    assert tree.parents.tolist() == [[-1, 0, 1], [-1, 0, 0]]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.8)], ids=["greedy", "sampling"])
def test_lookup_first_equals_plain(target, rows, params):
    drafter = Validating(LookupFirst(PromptLookup(depth=4, min_ngram=2), eagle(target)))
    assert_equal_to_plain(target, drafter, [[1, 2, 3, 1, 2], [4, 5], [7, 0, 3]][:rows], params)


WRAPPERS = {
    "adaptive": Adaptive,
    "merged first": lambda inner: Merged(inner, PromptLookup()),
    "merged second": lambda inner: Merged(PromptLookup(), inner),
    "lookup first": lambda inner: LookupFirst(PromptLookup(), inner),
}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapper_rejects_drafters_that_need_every_step_or_sample(target, wrap):
    with pytest.raises(ValueError, match=r"Lookahead.*(use it alone|adaptive=False)"):
        WRAPPERS[wrap](Lookahead())
    with pytest.raises(ValueError, match=r"SmallModel.*sampled=False"):
        WRAPPERS[wrap](SmallModel(target, target, sampled=True))
    wrapped = WRAPPERS[wrap](PromptLookup())
    assert wrapped.needs == PromptLookup.needs


def test_refuses_features_that_differ_and_sizes_out_of_range(target):
    lookup = PromptLookup()
    with pytest.raises(ValueError, match=r"\(2, 3, 4\).*as the second"):
        Merged(lookup, Fixed(([1], [-1]), needs=Needs(features=(2, 3, 4))))
    with pytest.raises(ValueError, match=r"num_nodes is 1; allowed"):
        Merged(lookup, lookup, num_nodes=1)
