"""Medusa: independent heads, each for one position ahead."""

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
from aquiline.tree import DraftTree


class MedusaNetwork(FinalNetwork):
    """K heads over the feature: a linear map, then residual blocks.

    Source: Medusa (arXiv 2401.10774 §2.1.1); differs: the linear map, which can begin as the
    regression of the feature ahead; one LM head for all heads, the target's or a smaller one.
    """

    def __init__(self, config: FinalHeadsConfig) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(
            LinearHead(config.hidden_size, config.hidden_size, config.num_blocks) for _ in range(config.num_heads)
        )

    def read(self, head: int, final: Tensor) -> Tensor:
        """What one head (from 0) reads, (…, H) → (…, H)."""
        return final

    def stream(self, head: int, final: Tensor) -> Tensor:
        """The stream of one head, (…, H) → (…, H)."""
        result: Tensor = self.heads[head](self.read(head, final))
        return result


class Medusa(FinalDrafter):
    """Drafts with Medusa heads; a node's candidates depend on its depth alone."""

    def propose(
        self,
        root: Tensor,
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: FinalState,
        max_depth: int | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`; all heads run at once."""
        network, paths = self.heads.network, self.paths(max_depth)
        assert isinstance(network, MedusaNetwork)
        final = state.feature[list(rows)]
        depths = range(max((len(path) for path in paths), default=0))
        # (B, depth, Vd): one matrix product reads out all heads.
        logits = self.logits(torch.stack([network.stream(d, final) for d in depths], 1)) if paths else None

        def candidates(depth: int, nodes: Sequence[int], tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
            assert logits is not None
            scores, ids = self.scored(logits[:, depth - 1], k)
            shape = (-1, len(nodes), -1)
            return scores[:, None].expand(shape), ids[:, None].expand(shape)

        return fill_tree(root, paths, candidates)
