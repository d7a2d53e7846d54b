"""Lookahead decoding: n-grams from the target's own Jacobi iteration, verified as drafts.

In addition to the drafts, each step computes a window of W columns and N − 1 levels: guesses for the
next positions. Level 0 is a chain below the root, and column j continues from its j-th token, so the
window is an ordinary tree; its nodes are never accepted::

    root ── a0 ── a1 ── a2        level 0
            │     │     │
            b0    b1    b2        level 1 = N − 2 (N = 3): the arg-max here is new

The target's arg-max at the last level completes W new n-grams (a0 b0 new0), which are pooled by their
first token. Then the window advances: level 1 becomes level 0, and the new tokens become the last
level. Drafts are the pooled n-grams that start with the root.

Source: Fu et al. (arXiv 2402.02057); differs: columns that the text has overtaken are refilled.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from aquiline import tree as trees
from aquiline.cache import check_fits
from aquiline.checks import integer
from aquiline.drafters.drafter import Committed, Needs, Rows
from aquiline.drafters.lookup import merge
from aquiline.tree import DraftTree


@dataclass(eq=False)
class _Column:
    """N − 1 tokens of consecutive positions, and how many of them the target has produced."""

    tokens: list[int]
    made: int = 0


@dataclass(eq=False)
class _Row:
    """One row's window and pool.

    Attributes:
        columns: W columns, or none before the first step.
        pool: first token → the other N − 1 tokens of its n-grams, oldest first.
    """

    columns: list[_Column] = field(default_factory=list)
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)


class Lookahead:
    """Drafts n-grams that the target itself produced in a window of guesses.

    Needs neither a head nor training. Each forward grows by window · (ngram − 1) nodes.

    Args:
        window: W, columns, ≥ 1.
        ngram: N, length of the n-grams with their first token, ≥ 2.
        guesses: G, n-grams kept for each first token and verified in a step, ≥ 1.
    """

    needs = Needs(every_step=True, source="lookahead")

    def __init__(self, window: int = 7, ngram: int = 5, guesses: int = 7) -> None:
        for name, value, least in (("window", window, 1), ("ngram", ngram, 2), ("guesses", guesses, 1)):
            integer(f"lookahead: {name}", value, least)
        size = 1 + (window + guesses) * (ngram - 1)
        check_fits(f"lookahead with window {window}, ngram {ngram}, guesses {guesses}", size, "lower one of them")
        self.window, self.ngram, self.guesses = window, ngram, guesses

    def new_state(self, slots: int, capacity: int) -> list[_Row]:
        return [_Row() for _ in range(slots)]

    def extend(self, committed: Committed, state: list[_Row]) -> None:
        """Pools the n-grams that the step completed, and moves the window to the end of the text."""
        made = self._made(committed)
        for i, (slot, text) in enumerate(zip(committed.rows.slots, committed.rows.texts, strict=True)):
            mine, moved = state[slot], 0
            if made is not None:
                self._advance(mine, made[i])
                moved = 1
            if mine.columns:
                del mine.columns[: max(committed.counts[i] - moved, 0)]  # overtaken by the text
                self._fill(mine, text)

    def propose(self, rows: Rows, state: list[_Row]) -> DraftTree:
        """Builds a tree of the candidates, followed by the window."""
        packed, candidates = [], []
        for slot, text in zip(rows.slots, rows.texts, strict=True):
            mine = state[slot]
            self._fill(mine, text)
            known = list(mine.pool.get(text[-1], ()))[::-1]
            tokens, parents = merge(text[-1], [ngram[: rows.max_depth] for ngram in known])
            first = len(tokens)
            candidates.append(first)
            for level in range(self.ngram - 1):
                for j, column in enumerate(mine.columns):
                    tokens.append(column.tokens[level])
                    above = first + (level - 1) * self.window + j
                    parents.append(above if level else (first + j - 1 if j else 0))
            packed.append((tokens, parents))
        return replace(trees.from_lists(packed), num_candidates=torch.tensor(candidates))

    def copy(self, source: int, slot: int, length: int, state: list[_Row]) -> None:
        """Does nothing: the window is filled from the text, and each request has its own pool."""

    def reset(self, slot: int, length: int, state: list[_Row]) -> None:
        """Drops the window; a chat that keeps a prefix keeps its pool."""
        state[slot] = _Row(pool=state[slot].pool) if length else _Row()

    def _made(self, committed: Committed) -> list[list[int]] | None:
        """Returns, per row, the target's arg-max at the W nodes of the last level; None without a window."""
        tree, logits = committed.tree, committed.logits
        if tree is None or logits is None or tree.num_candidates is None:
            return None  # a prompt, or a step without drafts
        last = (self.ngram - 2) * self.window + torch.arange(self.window, device=logits.device)
        nodes = tree.num_candidates.to(logits.device)[:, None] + last
        batch = torch.arange(len(nodes), device=logits.device)[:, None]
        made: list[list[int]] = logits[batch, nodes].argmax(-1).tolist()
        return made

    def _advance(self, mine: _Row, made: Sequence[int]) -> None:
        """Advances each column by one position: drops its first token, appends the target's."""
        for column, token in zip(mine.columns, made, strict=True):
            # In a column that started as guesses, at most the first token can still be one.
            if column.made >= self.ngram - 2:
                self._remember(mine, column.tokens[0], [*column.tokens[1:], token])
            column.tokens = [*column.tokens[1:], token]
            column.made += 1

    def _fill(self, mine: _Row, prefix: Sequence[int]) -> None:
        """Fills the window with guesses: tokens of the text, in an order that depends only on the text."""
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
