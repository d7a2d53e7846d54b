"""Speculative sampling: a small causal language model drafts a chain.

The model is any `Target` with the target's vocabulary. It has its own cache, and it reads the
committed tokens from the row's text: what it never fed (prompts, the target's own tokens, steps
without drafts) it feeds before it drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aquiline import tree as trees
from aquiline.cache import KVCache, commit, copy_prefix, truncate
from aquiline.drafters.sampled import draft_laws, draw_children, pack_drawn
from aquiline.drafters.trees import Chain
from aquiline.sampling import TokenChooser
from aquiline.targets.target import Feature, Target
from aquiline.tree import DraftTree

_CHUNK = 512  # tokens that are fed at once: bounds the memory of a long prompt


@dataclass(eq=False)
class SmallModelState:
    """What a `SmallModel` keeps per row.

    Attributes:
        cache: the small model's keys and values.
        drafted: per row, the drafts that lie at the end of the cache and may yet be refused.
    """

    cache: KVCache
    drafted: list[list[int]]


class SmallModel:
    """Drafts a chain with a small model.

    Args:
        model: the small model; its tokens must be the target's.
        target: the target.
        policy: length of the chain; `min_prob` ends it where it becomes unlikely.
        sampled: draw the drafts, where a row samples, instead of taking the likeliest. More of
            them are accepted at high temperatures; the output is then equal to plain decoding
            in distribution, not token for token.

    Source: Leviathan et al. (arXiv 2211.17192); Chen et al. (arXiv 2302.01318).
    """

    features: tuple[Feature, ...] = ()

    def __init__(self, model: Target, target: Target, policy: Chain | None = None, *, sampled: bool = False) -> None:
        if model.shape.vocab_size != target.shape.vocab_size:
            raise ValueError(
                f"the small model has {model.shape.vocab_size} tokens, the target {target.shape.vocab_size}; "
                "both must use one tokenizer: distil one with `aquiline train --method small-model`"
            )
        self.model, self.policy, self.sampled = model, policy or Chain(depth=4), sampled

    def new_state(self, rows: int, capacity: int) -> SmallModelState:
        """An empty cache for `rows` rows of `capacity` positions."""
        return SmallModelState(self.model.new_cache(rows, capacity), [[] for _ in range(rows)])

    def extend(
        self,
        tokens: Tensor,
        features: Tensor | None,
        num_new: Sequence[int],
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: SmallModelState,
    ) -> None:
        """Feeds long pieces (prompts); what a step left is fed together with the next root."""
        for row, prefix in zip(rows, prefixes, strict=True):
            self._settle(row, prefix, state)
            if len(prefix) > self.model.shape.max_positions:
                continue  # beyond the small model's context nothing is drafted
            while len(prefix) - int(state.cache.lengths[row]) > self.policy.depth + 2:
                start = int(state.cache.lengths[row])
                self._feed([prefix[start : min(start + _CHUNK, len(prefix) - 1)]], [row], state)

    def propose(
        self,
        root: Tensor,
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: SmallModelState,
        max_depth: int | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`."""
        floor = math.log(self.policy.min_prob) if self.policy.min_prob > 0 else -math.inf
        chains: list[list[int]] = [[] for _ in rows]
        scores = torch.zeros(len(rows), device=root.device)
        joint: list[list[float]] = [[0.0] for _ in rows]

        def choose(logits: Tensor) -> Tensor:
            best, token = logits.max(-1)
            scores.add_(best - logits.logsumexp(-1))
            for chain, log_probs, t, s in zip(chains, joint, token.tolist(), scores.tolist(), strict=True):
                if s >= floor and len(log_probs) == len(chain) + 1:
                    chain.append(t)
                    log_probs.append(s)
                else:
                    log_probs.append(-math.inf)  # this row's chain has ended
            return token

        self._chain(prefixes, rows, state, max_depth, choose, lambda: bool((scores < floor).all()))
        tree = trees.from_lists(
            [([int(r), *c], list(range(-1, len(c)))) for r, c in zip(root.tolist(), chains, strict=True)], root.device
        )
        padded = [(values + [-math.inf] * tree.size)[: tree.size] for values in joint]
        return replace(tree, log_probs=torch.tensor(padded, device=root.device))

    def propose_sampled(
        self,
        root: Tensor,
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: SmallModelState,
        choosers: Sequence[TokenChooser],
        generator: torch.Generator,
        max_depth: int | None = None,
    ) -> DraftTree:
        """See `SamplingDrafter.propose_sampled`; the chain's length does not depend on the draws."""
        texts = [list(prefix) for prefix in prefixes]
        tokens, drawn, laws = [root], [torch.ones_like(root, dtype=torch.bool)], list[Tensor]()

        def choose(logits: Tensor) -> Tensor:
            law = draft_laws(logits[:, None], choosers, [[text] for text in texts])
            token, valid = (part[:, 0, 0] for part in draw_children(law, 1, generator))
            for text, t in zip(texts, token.tolist(), strict=True):
                text.append(t)
            tokens.append(token)
            drawn.append(valid)
            laws.append(law[:, 0])
            return token

        self._chain(prefixes, rows, state, max_depth, choose, lambda: False)
        if not laws:
            return trees.root_only(root)
        laws.append(torch.zeros_like(laws[0]))
        ids, valid, probs = (torch.stack(part, dim=1) for part in (tokens, drawn, laws))
        return pack_drawn(ids, range(-1, len(tokens) - 1), valid, probs)

    def reset(self, row: int, length: int, state: SmallModelState) -> None:
        """See `Drafter.reset`."""
        # Drafts that nobody verified are not part of the text.
        kept = int(state.cache.lengths[row]) - len(state.drafted[row])
        state.drafted[row] = []
        truncate(state.cache, row, min(kept, length))

    def copy_prefix(self, source: int, target: int, length: int, state: SmallModelState) -> None:
        """See `CopyingDrafter.copy_prefix`."""
        fed = int(state.cache.lengths[source]) - len(state.drafted[source])
        state.drafted[target] = []
        copy_prefix(state.cache, source, target, min(fed, length))

    def _chain(
        self,
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: SmallModelState,
        max_depth: int | None,
        choose: Callable[[Tensor], Tensor],
        ended: Callable[[], bool],
    ) -> None:
        """Feeds what is missing, then drafts: `choose` takes (B, V) logits to the (B,) next tokens."""
        room = self.model.shape.max_positions - max(len(prefix) for prefix in prefixes)
        depth = min(self.policy.depth, room, self.policy.depth if max_depth is None else max_depth)
        if depth < 1:
            return
        for row, prefix in zip(rows, prefixes, strict=True):
            self._settle(row, prefix, state)
        pieces = [list(prefix[int(state.cache.lengths[row]) :]) for row, prefix in zip(rows, prefixes, strict=True)]
        for level in range(depth):
            token = choose(self._feed(pieces, rows, state))
            if level == depth - 1 or ended():
                return
            pieces = [[t] for t in token.tolist()]
            for row, piece in zip(rows, pieces, strict=True):
                state.drafted[row] += piece

    def _settle(self, row: int, prefix: Sequence[int], state: SmallModelState) -> None:
        """Keeps the drafts in the cache that became text, and forgets the others."""
        drafted = state.drafted[row]
        base = int(state.cache.lengths[row]) - len(drafted)
        kept = 0
        # One token of the text at least is fed anew: its logits begin the next chain.
        while kept < len(drafted) and base + kept < len(prefix) - 1 and drafted[kept] == prefix[base + kept]:
            kept += 1
        truncate(state.cache, row, min(base + kept, len(prefix) - 1))
        state.drafted[row] = []

    def _feed(self, pieces: Sequence[Sequence[int]], rows: Sequence[int], state: SmallModelState) -> Tensor:
        """Runs ragged pieces behind the cache and keeps them; (B, V) logits after the last tokens."""
        device, width = self.model.device, max(len(piece) for piece in pieces)
        ids = torch.tensor([[*piece, *[0] * (width - len(piece))] for piece in pieces], device=device)
        starts = state.cache.lengths[list(rows)].to(device)
        positions = starts[:, None] + torch.arange(width, device=device)
        last = torch.tensor([[len(piece) - 1] for piece in pieces], device=device)
        out = self.model.forward(ids, positions, None, state.cache, rows, (), last)
        for row, piece in zip(rows, pieces, strict=True):
            commit(state.cache, torch.arange(len(piece))[None], [row])
        return out.logits[:, 0]
