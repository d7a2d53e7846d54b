"""Trees that are deeper than a sliding window: a node's place is its depth, not its slot."""

from __future__ import annotations

import pytest
import torch

from aquiline.cache import commit
from aquiline.targets.target import TargetInput
from aquiline.tree import ancestors, depths, from_lists
from tests import tiny

PROMPT, DEPTH = [5, 9, 2], 15


@pytest.mark.parametrize("family", ["mistral", "qwen2"])  # windows of 12
def test_logits_at_a_node_are_those_of_a_forward_along_its_path(family: str) -> None:
    target = tiny.decoder(family)
    branches = [[(7 * i + 31 * branch) % tiny.VOCAB for i in range(DEPTH)] for branch in range(2)]
    # The branches take turns, so that a node's slot is about twice its depth.
    tokens, parents = [4], [-1]
    for level in range(DEPTH):
        parents += [0, 0] if level == 0 else [len(tokens) - 2, len(tokens) - 1]
        tokens += [branches[0][level], branches[1][level]]
    tree = from_lists([(tokens, parents)])
    cache = target.new_cache(1, 64)
    with torch.inference_mode():
        target.forward(TargetInput(torch.tensor([PROMPT]), torch.arange(3)[None], None, cache, [0]))
        commit(cache, torch.arange(3)[None], [0])
        positions = 3 + depths(tree.parents)
        found = target.forward(TargetInput(tree.tokens, positions, ancestors(tree.parents), cache, [0])).logits[0]
        for branch, path in enumerate(branches):
            text = torch.tensor([[*PROMPT, 4, *path]])
            fresh = target.new_cache(1, 64)
            plain = target.forward(TargetInput(text, torch.arange(text.shape[1])[None], None, fresh, [0])).logits[0]
            for level in range(DEPTH):
                torch.testing.assert_close(found[1 + 2 * level + branch], plain[4 + level], rtol=1e-9, atol=1e-9)
