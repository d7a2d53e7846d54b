"""Speculative sampling: a small causal language model drafts a chain.

The model is any `Target` with the target's vocabulary and has its own cache. It reads committed tokens
from the row's text: before drafting, it feeds those it has not seen yet (prompts, the target's own
tokens, steps without drafts).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from aquiline import tree as trees
from aquiline.cache import KVCache, commit, copy_prefix, truncate
from aquiline.drafters.coupled import Coupling
from aquiline.drafters.drafter import Committed, Needs, Rows
from aquiline.drafters.filling import to_host
from aquiline.drafters.sampled import draft_laws, draw_children, pack_drawn
from aquiline.drafters.trees import Chain
from aquiline.models.tokenizer import token_table
from aquiline.targets.target import Target, TargetInput, TargetShape
from aquiline.tree import DraftTree

logger = logging.getLogger("aquiline")

_CHUNK = 512
"""Tokens per forward, to bound the memory of a long prompt."""


@dataclass(eq=False)
class SmallModelState:
    """The state of a `SmallModel`.

    Attributes:
        drafted: per slot, the drafts at the end of the cache, not verified yet.
    """

    cache: KVCache
    drafted: list[list[int]]


_MOST_PADDING = 1 / 32
"""Vocabularies of one tokenizer are padded to different multiples; a larger difference means another tokenizer."""


def check_tokens(model: TargetShape, target: TargetShape) -> None:
    """Raises ValueError unless a small model has as many tokens as its target, up to padding."""
    larger = max(model.vocab_size, target.vocab_size)
    if abs(model.vocab_size - target.vocab_size) > larger * _MOST_PADDING:
        raise ValueError(
            f"the small model has {model.vocab_size} tokens, the target {target.vocab_size}; both must use one "
            "tokenizer: distil one with `aquiline train --method small-model`"
        )


def compare_tokens(draft: Path, target: Path | None, model: TargetShape, wanted: TargetShape) -> None:
    """Rejects a small model with another tokenizer: drafts would be legal tokens, and never accepted.

    A few tokens may differ, such as reserved ones that the target's training has named; a warning counts them.

    Args:
        draft: the small model's folder.
        target: the target's, or None if unknown.
        model: sizes of the small model.
        wanted: sizes of the target.

    Raises:
        ValueError: for another tokenizer, or if there is none to compare and the sizes differ.
    """
    mine, theirs = (None if folder is None else token_table(folder) for folder in (draft, target))
    if mine is None or theirs is None:
        if model.vocab_size == wanted.vocab_size:
            return
        raise ValueError(
            f"{draft} has {model.vocab_size} tokens, the target {wanted.vocab_size}, and one of them has no "
            "tokenizer.json to compare; put it into the folder"
        )
    shared = [i for i in mine.keys() & theirs.keys() if i < min(model.vocab_size, wanted.vocab_size)]
    odd = [i for i in sorted(shared) if mine[i] != theirs[i]]
    if len(odd) > len(shared) // 100 or not shared:
        example = f" (token {odd[0]} is {mine[odd[0]]!r} there and {theirs[odd[0]]!r} here)" if odd else ""
        raise ValueError(
            f"{draft} has another tokenizer than the target{example}; give a small model with the target's: distil one "
            "with `aquiline train --method small-model`"
        )
    if odd:
        logger.warning("%d tokens of %s differ from the target's, such as %r", len(odd), draft, mine[odd[0]])


class SmallModel:
    """Drafts a chain with a small model.

    Args:
        model: the small model; must share the target's tokens.
        policy: length of the chain; `min_prob` ends it when it becomes unlikely.
        gamma: exponent of its probabilities in coupled drafts, > 0; None if not measured.
        sampled: for rows that sample, draw drafts from the model's own distribution instead of coupling them
            with the target's draws; the output then equals plain decoding in distribution, not token for
            token.

    Source: Leviathan et al. (arXiv 2211.17192); Chen et al. (arXiv 2302.01318).
    """

    def __init__(
        self,
        model: Target,
        target: Target,
        policy: Chain | None = None,
        *,
        gamma: float | None = None,
        sampled: bool = False,
    ) -> None:
        check_tokens(model.shape, target.shape)
        self.model, self.policy, self.needs = model, policy or Chain(depth=4), Needs(samples=sampled, source="model")
        self._vocab_size, self._coupling = target.shape.vocab_size, Coupling(gamma=gamma)

    def new_state(self, slots: int, capacity: int) -> SmallModelState:
        return SmallModelState(self.model.new_cache(slots, capacity), [[] for _ in range(slots)])

    def extend(self, committed: Committed, state: SmallModelState) -> None:
        """Feeds long chunks (prompts); the tokens of a step are fed later, with the next root."""
        for slot, text in zip(committed.rows.slots, committed.rows.texts, strict=True):
            self._settle(slot, text, state)
            if len(text) > self.model.shape.max_positions:
                continue  # do not draft beyond the small model's context
            while len(text) - int(state.cache.lengths[slot]) > self.policy.depth + 2:
                start = int(state.cache.lengths[slot])
                self._feed([text[start : min(start + _CHUNK, len(text) - 1)]], [slot], state)

    def propose(self, rows: Rows, state: SmallModelState) -> DraftTree:
        able = [i for i, room in enumerate(self._room(rows)) if room > 0]
        if not able or rows.depth(self.policy.depth) < 1:
            return trees.root_only(rows.roots)
        if len(able) == len(rows.slots):
            return self._draft(rows, state)
        return _among(self._draft(rows.pick(able), state), able, rows.roots)

    def _draft(self, rows: Rows, state: SmallModelState) -> DraftTree:
        return self._drawn(rows, state) if self.needs.samples and rows.sample else self._likeliest(rows, state)

    def _room(self, rows: Rows) -> list[int]:
        """Per row, the drafts that the small model's context holds."""
        return [self.model.shape.max_positions - len(text) for text in rows.texts]

    def _likeliest(self, rows: Rows, state: SmallModelState) -> DraftTree:
        floor = math.log(self.policy.min_prob) if self.policy.min_prob > 0 else -math.inf
        tokens: list[Tensor] = []
        scores: list[Tensor] = []  # joint log-probabilities, (B,)

        def choose(logits: Tensor) -> Tensor:
            logits = self._coupling(logits, rows, len(tokens) + 1)
            best, token = logits.max(-1)
            score = (best - logits.logsumexp(-1)).float()
            tokens.append(token)
            scores.append(scores[-1] + score if scores else score)
            return token

        def ended() -> bool:
            # The host waits for the device in each test, so a device is asked once.
            asked = floor > -math.inf and (len(scores) == 1 or scores[-1].device.type == "cpu")
            return asked and bool((scores[-1] < floor).all())

        fed = self._chain(rows, state, choose, ended)
        ids, joint = to_host(torch.stack(tokens, dim=1), torch.stack(scores, dim=1))
        kept, log_probs, lists = [], [], zip(ids.tolist(), joint.tolist(), self._room(rows), strict=True)
        for slot, root, (chain, values, room) in zip(rows.slots, rows.roots, lists, strict=True):
            state.drafted[slot] += chain[:fed]
            count = next((i for i, value in enumerate(values[:room]) if not value >= floor), min(len(values), room))
            kept.append(([root, *chain[:count]], list(range(-1, count))))
            log_probs.append([0.0, *values[:count]])
        tree = trees.from_lists(kept)
        padded = [values + [-math.inf] * (tree.size - len(values)) for values in log_probs]
        return replace(tree, log_probs=torch.tensor(padded))

    def _drawn(self, rows: Rows, state: SmallModelState) -> DraftTree:
        """Draws a chain whose length does not depend on the draws."""
        root = torch.tensor(rows.roots, dtype=torch.int64, device=self.model.device)
        texts = [list(text) for text in rows.texts]
        tokens, drawn, laws = [root], [torch.ones_like(root, dtype=torch.bool)], list[Tensor]()
        room = torch.tensor(self._room(rows), device=self.model.device)

        def choose(logits: Tensor) -> Tensor:
            law = draft_laws(logits[:, None], rows.choosers, [[text] for text in texts])
            token, valid = (part[:, 0, 0] for part in draw_children(law, 1, rows.generator))
            for text, t in zip(texts, token.tolist(), strict=True):
                text.append(t)
            tokens.append(token)
            drawn.append(valid & (room >= len(tokens) - 1))
            laws.append(law[:, 0])
            return token

        fed = self._chain(rows, state, choose, lambda: False)
        for slot, text, drafts in zip(rows.slots, rows.texts, texts, strict=True):
            state.drafted[slot] += drafts[len(text) : len(text) + fed]
        laws.append(torch.zeros_like(laws[0]))
        ids, valid, probs = (torch.stack(part, dim=1) for part in (tokens, drawn, laws))
        return pack_drawn(ids, range(-1, len(tokens) - 1), valid, probs)

    def copy(self, source: int, slot: int, length: int, state: SmallModelState) -> None:
        fed = int(state.cache.lengths[source]) - len(state.drafted[source])
        state.drafted[slot] = []
        copy_prefix(state.cache, source, slot, min(fed, length))

    def reset(self, slot: int, length: int, state: SmallModelState) -> None:
        # Drafts that were never verified are not part of the text.
        kept = int(state.cache.lengths[slot]) - len(state.drafted[slot])
        state.drafted[slot] = []
        truncate(state.cache, slot, min(kept, length))

    def _chain(
        self, rows: Rows, state: SmallModelState, choose: Callable[[Tensor], Tensor], ended: Callable[[], bool]
    ) -> int:
        """Feeds missing tokens, then drafts; `choose` maps (B, V) logits to the (B,) next tokens.

        Returns:
            The number of drafts of each row that were fed, which the caller adds to `state.drafted`.
        """
        depth = min(rows.depth(self.policy.depth), max(self._room(rows)))
        for slot, text in zip(rows.slots, rows.texts, strict=True):
            self._settle(slot, text, state)
        missing = zip(rows.slots, rows.texts, strict=True)
        pieces = [list(text[int(state.cache.lengths[slot]) :]) for slot, text in missing]
        token = choose(self._feed(pieces, rows.slots, state))
        first = trees.index_on(token.device, *state.cache.lengths[list(rows.slots)].tolist())
        fed = 0
        while fed < depth - 1 and not ended():
            positions = (first + fed)[:, None].clamp(max=self.model.shape.max_positions - 1)
            logits = self._logits(token[:, None], positions, state, rows.slots)
            commit(state.cache, torch.zeros(len(rows.slots), 1, dtype=torch.int64), rows.slots)
            token = choose(logits)
            fed += 1
        return fed

    def _settle(self, slot: int, text: Sequence[int], state: SmallModelState) -> None:
        """Keeps the accepted drafts in the cache and discards the others."""
        drafted = state.drafted[slot]
        base = int(state.cache.lengths[slot]) - len(drafted)
        kept = 0
        # Feed at least one token of the text again: its logits start the next chain.
        while kept < len(drafted) and base + kept < len(text) - 1 and drafted[kept] == text[base + kept]:
            kept += 1
        truncate(state.cache, slot, min(base + kept, len(text) - 1))
        state.drafted[slot] = []

    def _feed(self, pieces: Sequence[Sequence[int]], slots: Sequence[int], state: SmallModelState) -> Tensor:
        """Runs and commits ragged chunks; returns (B, V) logits after their last tokens."""
        width = max(len(piece) for piece in pieces)
        ids = torch.tensor([[*piece, *[0] * (width - len(piece))] for piece in pieces], dtype=torch.int64)
        # Padding, and drafts of rows that have less room than others, may lie beyond the context: they are dropped.
        positions = state.cache.lengths[list(slots)][:, None] + torch.arange(width)
        positions = positions.clamp(max=self.model.shape.max_positions - 1)
        last = torch.tensor([[len(piece) - 1] for piece in pieces])
        ids, positions, last = trees.to_device(self.model.device, ids, positions, last)
        logits = self._logits(ids, positions, state, slots, last)
        for slot, piece in zip(slots, pieces, strict=True):
            commit(state.cache, torch.arange(len(piece))[None], [slot])
        return logits

    def _logits(
        self, ids: Tensor, positions: Tensor, state: SmallModelState, slots: Sequence[int], at: Tensor | None = None
    ) -> Tensor:
        """Runs the model; returns (B, V) logits over the target's vocabulary, -inf for tokens that the model lacks."""
        # It reads such tokens as token 0.
        known = torch.where(ids < self.model.shape.vocab_size, ids, 0)
        logits = self.model.forward(TargetInput(known, positions, None, state.cache, slots, (), at)).logits[:, 0]
        missing = self._vocab_size - logits.shape[-1]  # a negative number cuts
        return torch.nn.functional.pad(logits, (0, missing), value=-math.inf) if missing else logits


def _among(tree: DraftTree, indices: Sequence[int], roots: Sequence[int]) -> DraftTree:
    """Spreads the rows of a tree to these indices; the other rows have their root alone."""

    def spread(values: Tensor, fill: float) -> Tensor:
        result = values.new_full((len(roots), *values.shape[1:]), fill)
        result[list(indices)] = values
        return result

    tokens, log_probs, laws = spread(tree.tokens, 0), tree.log_probs, tree.draft_probs
    tokens[:, 0] = torch.tensor(roots, dtype=torch.int64)
    if log_probs is not None:
        log_probs = spread(log_probs, -math.inf)
        log_probs[:, 0] = 0
    return DraftTree(
        tokens,
        spread(tree.parents, -1),
        spread(tree.num_nodes, 1),
        log_probs,
        None if laws is None else spread(laws, 0),
    )
