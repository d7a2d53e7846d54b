"""Draws drafts from the draft's own distribution, for multi-round speculative sampling.

The draft applies the request's temperature, filters and penalties to its own logits.
`DraftTree.draft_probs` keeps the distributions, which `aquiline.verify.accept_sampled` needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from aquiline import tree as trees
from aquiline.drafters.drafter import Rows
from aquiline.drafters.trees import Chain, DynamicTree, TreePolicy
from aquiline.sampling import TokenChooser, distribution, processed_logits
from aquiline.tree import DraftTree


def draft_laws(logits: Tensor, choosers: Sequence[TokenChooser], prefixes: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """Returns the distributions that children are drawn from.

    They omit the user's logits processors, which may be stateful and run only once per emitted token.
    At temperature 0 the arg-max has probability 1.

    Args:
        logits: (B, W, V) draft logits over the target's vocabulary; -inf for tokens outside the draft's.
        prefixes: per row and node, all tokens up to and including the node.

    Returns:
        (B, W, V) float32; all zeros if every token is barred.
    """
    laws = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    for row, chooser in enumerate(choosers):
        params = replace(chooser.params, logits_processors=())
        scores = logits[row].float()
        if params.has_processors:
            scores = torch.stack(
                [
                    processed_logits(scores[i], params, prefixes[row][i], chooser.prompt_length, chooser.end_ids)
                    for i in range(len(scores))
                ]
            )
        if params.temperature == 0:
            laws[row].scatter_(1, scores.argmax(-1, keepdim=True), 1.0)
        else:
            laws[row] = distribution(scores, params)
    # If all tokens are barred, the softmax is NaN, and nothing can be drafted.
    return laws.nan_to_num_(nan=0.0)


def check_ranks(policy: TreePolicy) -> None:
    """Rejects trees without a fixed shape, and those that omit a child before a later one.

    The children of a node are verified in drawing order; without the second child, the third one does
    not have the distribution of a second draw.

    Raises:
        ValueError: names the missing path.
    """
    if isinstance(policy, DynamicTree):
        raise ValueError("sampled drafts need a tree of fixed shape; use a chain or a static tree")
    if isinstance(policy, Chain):
        return
    known = set(policy.paths)
    for path in policy.paths:
        before = (*path[:-1], path[-1] - 1)
        if path[-1] > 0 and before not in known:
            raise ValueError(f"sampled drafts need {before} in the tree before {path}; add it")


def draw_children(laws: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws up to `count` tokens from each law without replacement, in drawing order.

    An exponential race: token v finishes at time E_v / q_v, and the order of finishing is an order of
    draws without replacement.

    Args:
        laws: (B, W, V) probabilities.
        count: children of each node.

    Returns:
        (B, W, count) int64 tokens and bool validity: False where the support was exhausted.
    """
    times = torch.empty(laws.shape).exponential_(generator=generator).to(laws.device)
    speed = laws / times.clamp_(min=torch.finfo(torch.float32).tiny)
    first, tokens = speed.topk(min(count, laws.shape[-1]), dim=-1)
    missing = (0, count - first.shape[-1])
    pad = torch.nn.functional.pad
    return pad(tokens, missing), pad(first, missing) > 0


@dataclass(eq=False)
class DrawnCandidates:
    """Draws the candidates of a static tree, and keeps their distributions.

    Attributes:
        rows: the rows: their choosers, texts and generator.
        draft_to_target: (Vd,) int64 target ids of the draft ids, or None if they coincide.
        vocab_size: V of the target.
        laws: node → (B, V) distribution of its children.
    """

    rows: Rows
    draft_to_target: Tensor | None
    vocab_size: int
    laws: dict[int, Tensor] = field(default_factory=dict)

    def __call__(
        self, logits: Tensor, count: int, nodes: Sequence[int], tokens: Tensor, parents: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Draws children.

        Args:
            logits: (B, W, Vd) draft logits of W nodes.
            count: children of each.
            nodes: W node indices.
            tokens: (B, N) int64, filled down to these nodes.
            parents: N parents.

        Returns:
            (B, W, count) log-probabilities, -inf if the support was exhausted; and target ids.
        """
        if self.draft_to_target is not None:
            full = logits.new_full((*logits.shape[:2], self.vocab_size), -torch.inf)
            full[..., self.draft_to_target] = logits
            logits = full
        texts = [
            [[*text, *trees.path_tokens(row, parents, node)] for node in nodes]
            for text, row in zip(self.rows.texts, tokens.tolist(), strict=True)
        ]
        laws = draft_laws(logits, self.rows.choosers, texts)
        self.laws.update(zip(nodes, laws.unbind(1), strict=True))
        ids, valid = draw_children(laws, count, self.rows.generator)
        return laws.gather(-1, ids).log().masked_fill(~valid, -torch.inf), ids

    def pack(self, tree: DraftTree) -> DraftTree:
        """Converts the filled static tree to a tree for `accept_sampled`."""
        assert tree.log_probs is not None
        none = torch.zeros_like(next(iter(self.laws.values())))
        laws = torch.stack([self.laws.get(node, none) for node in range(tree.size)], dim=1)
        return pack_drawn(tree.tokens, tree.parents[0].tolist(), tree.log_probs.isfinite(), laws)


def pack_drawn(tokens: Tensor, parents: Sequence[int], drawn: Tensor, laws: Tensor) -> DraftTree:
    """Drops the nodes that could not be drawn, and their descendants.

    Args:
        tokens: (B, N) int64, node 0 the root.
        parents: N parents, the same for all rows.
        drawn: (B, N) bool, False where a node's token was not drawn.
        laws: (B, N, V) distribution of each node's children.
    """
    rows, kept_laws = [], []
    for ids, valid, law in zip(tokens.tolist(), drawn.tolist(), laws, strict=True):
        index = {0: 0}
        for node in range(1, len(parents)):
            if valid[node] and parents[node] in index:
                index[node] = len(index)
        kept = list(index)
        above = [index[parents[node]] if node else -1 for node in kept]
        rows.append(([ids[node] for node in kept], above))
        kept_laws.append(law[trees.index_on(law.device, *kept)])
    tree = trees.from_lists(rows)
    padded = [torch.nn.functional.pad(law, (0, 0, 0, tree.size - len(law))) for law in kept_laws]
    return replace(tree, draft_probs=torch.stack(padded))
