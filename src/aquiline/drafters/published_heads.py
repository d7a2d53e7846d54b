"""The networks of published Medusa and Hydra checkpoints, where each head has an LM head of its own.

Their `stream` is already the logits of a head, (…, V), so that the drafters need not know.

Source: Medusa (arXiv 2401.10774 §2.1.1), Hydra (arXiv 2402.05109 §3), in the form of their
repositories (FasterDecoding/Medusa, zankner/Hydra).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from aquiline.drafters.final_heads import FinalHeads, FinalHeadsConfig, FinalNetwork, ResidualBlock
from aquiline.drafters.hydra import HydraNetwork
from aquiline.drafters.medusa import MedusaNetwork
from aquiline.targets.target import Target


class PublishedHeads(FinalHeads):
    """Heads whose streams are logits."""

    def logits(self, stream: Tensor, target: Target) -> Tensor:
        """The stream itself, at least float32."""
        return stream.to(torch.promote_types(stream.dtype, torch.float32))


class PublishedMedusaNetwork(MedusaNetwork):
    """K times: residual blocks over the feature, then an LM head.

    Args:
        config: sizes.
        lm_bias: the LM heads have biases (Hydra's ungrounded heads do).
    """

    def __init__(self, config: FinalHeadsConfig, *, lm_bias: bool = False) -> None:
        FinalNetwork.__init__(self, config)  # not the linear maps of our own heads
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(config.hidden_size) for _ in range(config.num_blocks)))
            for _ in range(config.num_heads)
        )
        self.lm_heads = _lm_heads(config, lm_bias)

    def stream(self, head: int, final: Tensor) -> Tensor:
        """The logits of one head (from 0), (…, H) → (…, V)."""
        result: Tensor = self.lm_heads[head](super().stream(head, final))
        return result


class ReducingBlock(nn.Module):
    """R x + SiLU(W x), from (1 + tokens) · size to size.

    Args:
        size: width of the result.
        tokens: embeddings read beside the feature.
    """

    def __init__(self, size: int, tokens: int) -> None:
        super().__init__()
        self.linear = nn.Linear((1 + tokens) * size, size)
        self.res_connection = nn.Linear((1 + tokens) * size, size)

    def forward(self, x: Tensor) -> Tensor:
        """(…, (1 + tokens) · size) → (…, size)."""
        result: Tensor = self.res_connection(x) + nn.functional.silu(self.linear(x))
        return result


class PublishedHydraNetwork(HydraNetwork):
    """K times: a block over [feature, embeddings of the path], residual blocks, an LM head."""

    def __init__(self, config: FinalHeadsConfig) -> None:
        FinalNetwork.__init__(self, config)  # not the norms and mixers of our own heads
        size = config.hidden_size
        self.heads = nn.ModuleList(
            nn.Sequential(ReducingBlock(size, i + 1), *(ResidualBlock(size) for _ in range(config.num_blocks - 1)))
            for i in range(config.num_heads)
        )
        self.lm_heads = _lm_heads(config, bias=True)

    def stream(self, head: int, final: Tensor, embedded: Tensor) -> Tensor:
        """The logits of one head.

        Args:
            head: i, from 0.
            final: (…, H) features.
            embedded: (…, i + 1, H) embeddings of root, d1, …, di.

        Returns:
            (…, V).
        """
        read = torch.cat((final, embedded.flatten(-2)), dim=-1)
        result: Tensor = self.lm_heads[head](self.heads[head](read))
        return result


def _lm_heads(config: FinalHeadsConfig, bias: bool) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(config.hidden_size, config.vocab_size, bias=bias) for _ in range(config.num_heads))
