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
    ResidualBlock,
    fill_tree,
)
from aquiline.targets.layers import RMSNorm
from aquiline.tree import DraftTree


class HydraHead(nn.Module):
    """h + SiLU(W [h, e(root), e(d1), …, e(di)]), then more residual blocks.

    Args:
        config: sizes.
        tokens: how many embeddings it reads, ≥ 1.
    """

    def __init__(self, config: FinalHeadsConfig, tokens: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.mix = nn.Linear((1 + tokens) * size, size)
        nn.init.zeros_(self.mix.weight)
        nn.init.zeros_(self.mix.bias)
        self.blocks = nn.Sequential(*(ResidualBlock(size) for _ in range(config.num_blocks - 1)))

    def forward(self, final: Tensor, read: Tensor) -> Tensor:
        """final (…, H) and the normed inputs (…, (1 + tokens) · H) → stream (…, H)."""
        result: Tensor = self.blocks(final + nn.functional.silu(self.mix(read)))
        return result


class HydraNetwork(FinalNetwork):
    """K heads; head i (from 0) reads the feature and the i + 1 last tokens of the path.

    Source: Hydra (arXiv 2402.05109 §3); differs: feature and embeddings are normed, since their
    scales differ; one LM head for all heads.
    """

    def __init__(self, config: FinalHeadsConfig) -> None:
        super().__init__(config)
        self.feature_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.embedding_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.heads = nn.ModuleList(HydraHead(config, i + 1) for i in range(config.num_heads))

    def stream(self, head: int, final: Tensor, embedded: Tensor) -> Tensor:
        """The stream of one head.

        Args:
            head: i, from 0.
            final: (…, H) features.
            embedded: (…, i + 1, H) embeddings of root, d1, …, di.
        """
        read = torch.cat((self.feature_norm(final), self.embedding_norm(embedded).flatten(-2)), dim=-1)
        result: Tensor = self.heads[head](final, read)
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
            return self.scored(self.heads.logits(stream, self.target), k)

        return fill_tree(root, paths, candidates)
