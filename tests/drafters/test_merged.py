"""Two drafters in one tree: duplicates are shared, both are accepted from, the output is plain's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.merged import Merged
from aquiline.drafters.small_model import SmallModel
from aquiline.drafters.trees import Chain, DynamicTree
from aquiline.sampling import SamplingParams
from aquiline.tree import from_lists
from tests import tiny
from tests.drafters.loop import Validating, assert_equal_to_plain, noisy, run, tiny_target


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
    """Proposes one tree."""

    features = ()

    def __init__(self, *rows):
        self.tree = from_lists(rows)

    def new_state(self, rows, capacity):
        return None

    def propose(self, *_):
        return self.tree


def test_duplicates_are_shared_and_the_budget_cuts_the_second():
    first = Fixed(([9, 1, 2, 3], [-1, 0, 0, 1]), ([9], [-1]))
    second = Fixed(([9, 1, 3, 4], [-1, 0, 1, 2]), ([9, 5], [-1, 0]))
    arguments = (torch.tensor([9, 9]), [[9], [9]], [0, 1])
    merged = Merged(first, second)
    tree = merged.propose(*arguments, merged.new_state(2, 8))
    assert tree.tokens.tolist() == [[9, 1, 2, 3, 4], [9, 5, 0, 0, 0]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 3], [-1, 0, -1, -1, -1]]
    merged = Merged(first, second, num_nodes=4)
    tree = merged.propose(*arguments, merged.new_state(2, 8))
    assert tree.num_nodes.tolist() == [4, 2]
    assert tree.tokens[0].tolist() == [9, 1, 2, 3]


def test_refuses_what_cannot_be_merged(target):
    lookup = PromptLookup()
    with pytest.raises(ValueError, match="different target features"):
        Merged(lookup, eagle(target))
    with pytest.raises(ValueError, match="num_nodes is 1"):
        Merged(lookup, lookup, num_nodes=1)
