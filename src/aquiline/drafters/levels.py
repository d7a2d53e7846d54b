"""Levels of a growing tree: each sees those above it in the draft network's own cache, before anything is accepted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Level:
    """The nodes of one level of a growing tree, as input of a draft network.

    Attributes:
        tokens: (B, W) int64.
        hidden: (B, W, H) feedback of their parents.
        visible: (B, W, offset + W) bool over the slots of all levels fed so far and this one; None for
            a chain, which sees all of them.
        offset: slots of earlier levels.
    """

    tokens: Tensor
    hidden: Tensor
    visible: Tensor | None
    offset: int

    def after(self, tokens: Tensor, feedback: Tensor) -> Level:
        """Builds the next level of a chain, (B, 1)."""
        return Level(tokens, feedback, None, self.offset + 1)

    def below(self, tokens: Tensor, feedback: Tensor, parents: Tensor) -> Level:
        """Builds the next level; `parents` (B, W') index this level's nodes, with `feedback` (B, W, H)."""
        width, offset = tokens.shape[1], self.offset + self.tokens.shape[1]
        if self.visible is None and width == 1:
            return self.after(tokens, feedback)
        seen = self.visible
        if seen is None:
            seen = torch.ones(len(tokens), 1, offset, dtype=torch.bool, device=tokens.device)
        inherited = seen.gather(1, parents[:, :, None].expand(-1, -1, offset))
        return Level(
            tokens=tokens,
            hidden=feedback.gather(1, parents[:, :, None].expand(-1, -1, feedback.shape[2])),
            visible=torch.cat((inherited, _eye(len(tokens), width, tokens.device)), dim=2),
            offset=offset,
        )


def first_level(tokens: Tensor, feedback: Tensor) -> Level:
    """Builds the level below the root: tokens (B, W), `feedback` (B, 1, H) is the root's."""
    width = tokens.shape[1]
    visible = None if width == 1 else _eye(len(tokens), width, tokens.device)
    return Level(tokens, feedback.expand(-1, width, -1), visible, 0)


def _eye(batch: int, width: int, device: torch.device) -> Tensor:
    return torch.eye(width, dtype=torch.bool, device=device).expand(batch, -1, -1)
