"""A drafter whose acceptance is known, and a bed without a real model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from aquiline import tree as trees
from aquiline.bench.methods import Bed
from aquiline.drafters.drafter import Committed, Needs, Rows
from aquiline.tree import DraftTree
from tests.knowing_drafter import Known
from tests.path_target import PathTarget
from tests.tiny_tokenizers import every_byte


def path_bed(*, max_positions: int = 512, target: Any = None) -> Bed:
    """A bed on a target without a network, with a tokenizer of single bytes."""
    tokenizer = every_byte()
    target = target or few_words(PathTarget(len(tokenizer), max_positions))
    return Bed(target, tokenizer, (0,), None, "path", {})


def few_words(target: PathTarget) -> PathTarget:
    """The same target, saying three tokens only: its text repeats, so that a lookup finds something."""
    few = torch.zeros(target.shape.vocab_size, dtype=torch.bool)
    few[40:43] = True
    target._table[:, ~few] -= 100.0
    return target


class ScriptedDrafter:
    """Drafts chains of `depth` whose first script[i] tokens are right in step i, and no more.

    Args:
        known: the continuation of a text.
        script: accepted drafts of each step, repeated from the start when it ends.
        depth: length of every chain.
        confidence: draft probability that it states for each token.
    """

    needs = Needs()

    def __init__(self, known: Known, script: Sequence[int], depth: int, confidence: float) -> None:
        self.known, self.script, self.depth, self.confidence = known, script, depth, confidence
        self.step = 0

    def new_state(self, slots: int, capacity: int) -> None:
        return None

    def extend(self, committed: Committed, state: None) -> None:
        pass

    def copy(self, source: int, slot: int, length: int, state: None) -> None:
        pass

    def reset(self, slot: int, length: int, state: None) -> None:
        pass

    def propose(self, rows: Rows, state: None) -> DraftTree:
        depth = rows.depth(self.depth)
        right = self.script[self.step % len(self.script)]
        self.step += 1
        chains = []
        for text in rows.texts:
            truth = list(self.known(text))[:depth]
            chain = [token if i < right else (token + 1) % 7 for i, token in enumerate(truth)]
            chains.append(([text[-1], *chain], list(range(-1, len(chain)))))
        tree = trees.from_lists(chains)
        joint = torch.arange(tree.size) * torch.tensor(self.confidence).log()
        return replace(tree, log_probs=joint.expand(len(chains), -1))
