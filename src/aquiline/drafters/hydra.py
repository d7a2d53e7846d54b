"""Hydra: heads that also read the tokens drafted so far on the path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from aquiline.drafters.final_heads import (
    FinalDrafter,
    FinalHeadsConfig,
    FinalNetwork,
    FinalState,
    LinearHead,
    fill_tree,
)
from aquiline.targets.layers import RMSNorm
from aquiline.tree import DraftTree


class HydraNetwork(FinalNetwork):
    """K heads; head i (from 0) reads the feature and the i + 1 tokens of the path.

    Source: Hydra (arXiv 2402.05109 §3); differs: feature and embeddings are normed, since their
    scales differ; the first map is linear, so that it can begin as the regression of the feature
    ahead; one LM head for all heads.
    """

    def __init__(self, config: FinalHeadsConfig) -> None:
        super().__init__(config)
        self.feature_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.embedding_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        size = config.hidden_size
        self.heads = nn.ModuleList(LinearHead((2 + i) * size, size, config.num_blocks) for i in range(config.num_heads))

    def read(self, head: int, final: Tensor, embedded: Tensor) -> Tensor:
        """What one head reads.

        Args:
            head: i, from 0.
            final: (…, H) features.
            embedded: (…, i + 1, H) embeddings of root, d1, …, di.

        Returns:
            (…, (2 + i) · H).
        """
        return torch.cat((self.feature_norm(final), self.embedding_norm(embedded).flatten(-2)), dim=-1)

    def stream(self, head: int, final: Tensor, embedded: Tensor) -> Tensor:
        """The stream of one head, (…, H); arguments as `read`."""
        result: Tensor = self.heads[head](self.read(head, final, embedded))
        return result


class Hydra(FinalDrafter):
    """Drafts with Hydra heads, level by level."""

    def propose(
        self,
        root: Tensor,
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: FinalState,
        max_depth: int | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`."""
        network, paths = self.heads.network, self.paths(max_depth)
        assert isinstance(network, HydraNetwork)
        final = state.feature[list(rows)]
        nodes_of: dict[tuple[int, ...], list[int]] = {(): [0]}
        for node, path in enumerate(paths, 1):
            nodes_of[path] = [*nodes_of[path[:-1]], node]
        lines = list(nodes_of.values())  # node → nodes from the root to it

        def candidates(depth: int, nodes: Sequence[int], tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
            path_tokens = tokens[:, torch.tensor([lines[node] for node in nodes], device=tokens.device)]
            embedded = self.target.embed(path_tokens).to(final.dtype)  # (B, W, depth, H)
            stream = network.stream(depth - 1, final[:, None].expand(-1, len(nodes), -1), embedded)
            return self.scored(self.logits(stream), k)

        return fill_tree(root, paths, candidates)
