"""Lookahead decoding: n-grams from the target's own Jacobi iteration, verified as drafts.

Beside the drafts, each step forwards a window of W columns and N − 1 levels: guesses for the
positions to come. Level 0 is a chain below the root, and column j goes on from its j-th token,
so that the window is a tree like any other; its nodes are never accepted::

    root ── a0 ── a1 ── a2        level 0
            │     │     │
            b0    b1    b2        level 1 = N − 2 (N = 3): the arg-max here is new

The target's arg-max at the last level makes W new n-grams (a0 b0 new0), which go into a pool
under their first token, and the window moves on: level 1 becomes level 0, and what is new the
last level. Drafts are the pooled n-grams that begin with the root.

Source: Fu et al. (arXiv 2402.02057); differs: columns that the text has overtaken are refilled.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from aquiline import tree as trees
from aquiline.cache import check_fits
from aquiline.checks import integer
from aquiline.drafters.lookup import merge
from aquiline.targets.target import Feature
from aquiline.tree import DraftTree


@dataclass(eq=False)
class _Column:
    """N − 1 tokens of consecutive positions, and how many of them the target has made."""

    tokens: list[int]
    made: int = 0


@dataclass(eq=False)
class _Row:
    """One row's window and pool.

    Attributes:
        columns: W columns, or none before the first step.
        pool: first token → n-grams' other N − 1 tokens, the oldest first.
        observed: positions that the window has moved on since the last `extend`.
        indexed: tokens of the text that the pool knows.
    """

    columns: list[_Column] = field(default_factory=list)
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)
    observed: int = 0
    indexed: int = 0


class Lookahead:
    """Drafts n-grams that the target itself made in a window of guesses.

    Needs no head and no training. Each forward is larger by window · (ngram − 1) nodes.

    Args:
        window: W, columns, ≥ 1.
        ngram: N, length of the n-grams with their first token, ≥ 2.
        guesses: G, n-grams kept for each first token and verified in a step, ≥ 1.
        from_text: also pool the n-grams of the prompt and the output.
    """

    features: tuple[Feature, ...] = ()

    def __init__(self, window: int = 7, ngram: int = 5, guesses: int = 7, *, from_text: bool = False) -> None:
        for name, value, least in (("window", window, 1), ("ngram", ngram, 2), ("guesses", guesses, 1)):
            integer(f"lookahead: {name}", value, least)
        size = 1 + (window + guesses) * (ngram - 1)
        check_fits(f"lookahead with window {window}, ngram {ngram}, guesses {guesses}", size, "lower one of them")
        self.window, self.ngram, self.guesses, self.from_text = window, ngram, guesses, from_text

    def new_state(self, rows: int, capacity: int) -> list[_Row]:
        """Empty windows and pools for `rows` rows."""
        return [_Row() for _ in range(rows)]

    def extend(
        self,
        tokens: Tensor,
        features: Tensor | None,
        num_new: Sequence[int],
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: list[_Row],
    ) -> None:
        """Moves the window on to where the text now ends."""
        for row, count, prefix in zip(rows, num_new, prefixes, strict=True):
            mine = state[row]
            overtaken = max(count - mine.observed, 0)
            mine.observed = 0
            if mine.columns:
                del mine.columns[:overtaken]
                self._fill(mine, prefix)
            if self.from_text:
                for end in range(max(mine.indexed + 1, self.ngram), len(prefix) + 1):
                    self._remember(mine, prefix[end - self.ngram], prefix[end - self.ngram + 1 : end])
                mine.indexed = max(mine.indexed, len(prefix))

    def propose(
        self,
        root: Tensor,
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: list[_Row],
        max_depth: int | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`; the window follows the candidates."""
        packed, candidates = [], []
        for row, prefix in zip(rows, prefixes, strict=True):
            mine = state[row]
            self._fill(mine, prefix)
            known = list(mine.pool.get(prefix[-1], ()))[::-1]
            tokens, parents = merge(prefix[-1], [ngram[:max_depth] for ngram in known])
            first = len(tokens)
            candidates.append(first)
            for level in range(self.ngram - 1):
                for j, column in enumerate(mine.columns):
                    tokens.append(column.tokens[level])
                    above = first + (level - 1) * self.window + j
                    parents.append(above if level else (first + j - 1 if j else 0))
            packed.append((tokens, parents))
        tree = trees.from_lists(packed, root.device)
        return replace(tree, num_candidates=torch.tensor(candidates, device=root.device))

    def observe(self, tree: DraftTree, logits: Tensor, rows: Sequence[int], state: list[_Row]) -> None:
        """Takes the target's arg-max at the last level of the window (see `ObservingDrafter`)."""
        if tree.num_candidates is None:
            return  # a step without drafts
        last = (self.ngram - 2) * self.window + torch.arange(self.window, device=logits.device)
        nodes = tree.num_candidates.to(logits.device)[:, None] + last
        batch = torch.arange(len(rows), device=logits.device)[:, None]
        for row, made in zip(rows, logits[batch, nodes].argmax(-1).tolist(), strict=True):
            mine = state[row]
            for column, token in zip(mine.columns, made, strict=True):
                # Of a column that began as guesses, only the first token may still be one.
                if column.made >= self.ngram - 2:
                    self._remember(mine, column.tokens[0], [*column.tokens[1:], token])
                column.tokens = [*column.tokens[1:], token]
                column.made += 1
            mine.observed = 1

    def reset(self, row: int, length: int, state: list[_Row]) -> None:
        """See `Drafter.reset`; what is kept of a chat keeps its pool."""
        state[row] = _Row(pool=state[row].pool) if length else _Row()

    def _fill(self, mine: _Row, prefix: Sequence[int]) -> None:
        """Fills the window up with guesses: tokens of the text, in an order that depends on it alone."""
        missing = self.window - len(mine.columns)
        if missing:
            guess = random.Random(len(prefix))
            mine.columns += [_Column(guess.choices(prefix, k=self.ngram - 1)) for _ in range(missing)]

    def _remember(self, mine: _Row, first: int, following: Sequence[int]) -> None:
        known = mine.pool.setdefault(first, {})
        ngram = tuple(following)
        known.pop(ngram, None)  # seen again: now the youngest
        known[ngram] = None
        if len(known) > self.guesses:
            del known[next(iter(known))]
