"""The networks of Medusa and Hydra: K heads that read the target's "final" feature.

If h is the feature that predicted the root, head i (from 1) predicts the token i positions after the
root::

    position      t      t+1    t+2    t+3
    feature       h
    token                root   d1     d2
    read from h          LM     head 1 head 2

In our form each head maps h to a stream of the same width, the input of an LM head: the target's own,
or a smaller one shared by the heads. In the published checkpoints each head has its own LM head, and
its stream already is the logits.

Source: Medusa (arXiv 2401.10774 §2.1.1), Hydra (arXiv 2402.05109 §3); the published form is that
of their repositories (FasterDecoding/Medusa, zankner/Hydra).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aquiline.targets.layers import RMSNorm


@dataclass(frozen=True)
class ParallelConfig:
    """K Medusa or Hydra heads.

    Attributes:
        kind: "medusa" or "hydra".
        num_heads: K, the deepest draft, ≥ 1.
        hidden_size: H of the target.
        vocab_size: V of the target.
        draft_vocab_size: number of ids that the heads draft; V without a reduction.
        num_blocks: residual blocks per head, ≥ 1.
        own_lm_head: whether the heads share their own LM head; otherwise they use the target's.
        rms_norm_eps: epsilon of Hydra's input norms.
        accuracies: per head, the measured accuracy of its candidate of each rank, which determines
            the default tree. Empty: unknown.
    """

    kind: str
    num_heads: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_blocks: int = 1
    own_lm_head: bool = False
    rms_norm_eps: float = 1e-5
    accuracies: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("medusa", "hydra"):
            raise ValueError(f"head kind {self.kind!r} is unknown; allowed: medusa, hydra")
        for name in ("num_heads", "num_blocks", "draft_vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: ≥ 1")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}")


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b); initialised as the identity."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(…, size) → (…, size)."""
        return x + nn.functional.silu(self.linear(x))


class LinearHead(nn.Module):
    """A linear map, then residual blocks; initially returns the feature, its first `size` inputs.

    Args:
        inputs: width of the input, the feature first.
        size: width of the feature and of the stream.
    """

    def __init__(self, inputs: int, size: int, blocks: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, size)
        self.blocks = nn.Sequential(*(ResidualBlock(size) for _ in range(blocks)))
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(size, inputs))
            self.linear.bias.zero_()

    def forward(self, read: Tensor) -> Tensor:
        """(…, inputs) → (…, size)."""
        result: Tensor = self.blocks(self.linear(read))
        return result


class ParallelNetwork(nn.Module):
    """A configuration, and the heads' shared LM head if they have one."""

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__()
        self.config = config
        if config.own_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)


class MedusaNetwork(ParallelNetwork):
    """K heads over the feature: a linear map, then residual blocks.

    Differs from the paper: the linear map, which can start as the regression of the feature ahead;
    one LM head for all heads, the target's or a smaller one.
    """

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(
            LinearHead(config.hidden_size, config.hidden_size, config.num_blocks) for _ in range(config.num_heads)
        )

    def read(self, head: int, final: Tensor) -> Tensor:
        """Returns the input of one head (from 0), (…, H) → (…, H)."""
        return final

    def stream(self, head: int, final: Tensor) -> Tensor:
        """Returns the stream of one head, (…, H) → (…, H)."""
        result: Tensor = self.heads[head](self.read(head, final))
        return result


class HydraNetwork(ParallelNetwork):
    """K heads; head i (from 0) reads the feature and the i + 1 tokens of the path.

    Differs from the paper: feature and embeddings are normed, since their scales differ; the first
    map is linear, so that it can start as the regression of the feature ahead; one LM head for all
    heads.
    """

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        self.feature_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.embedding_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        size = config.hidden_size
        self.heads = nn.ModuleList(LinearHead((2 + i) * size, size, config.num_blocks) for i in range(config.num_heads))

    def read(self, head: int, final: Tensor, embedded: Tensor) -> Tensor:
        """Joins the input of head i (from 0), (…, (2 + i) · H).

        Args:
            head: i.
            final: (…, H) features.
            embedded: (…, i + 1, H) embeddings of root, d1, …, di.
        """
        return torch.cat((self.feature_norm(final), self.embedding_norm(embedded).flatten(-2)), dim=-1)

    def stream(self, head: int, final: Tensor, embedded: Tensor) -> Tensor:
        """Returns the stream of one head, (…, H); arguments as `read`."""
        result: Tensor = self.heads[head](self.read(head, final, embedded))
        return result


class PublishedMedusaNetwork(ParallelNetwork):
    """K times: residual blocks over the feature, then an LM head.

    Args:
        lm_bias: whether the LM heads have biases (as in Hydra's ungrounded heads).
    """

    def __init__(self, config: ParallelConfig, *, lm_bias: bool = False) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(config.hidden_size) for _ in range(config.num_blocks)))
            for _ in range(config.num_heads)
        )
        self.lm_heads = _lm_heads(config, lm_bias)

    def stream(self, head: int, final: Tensor) -> Tensor:
        """Returns the logits of one head (from 0), (…, H) → (…, V)."""
        result: Tensor = self.lm_heads[head](self.heads[head](final))
        return result


class ReducingBlock(nn.Module):
    """R x + SiLU(W x), from (1 + tokens) · size to size.

    Args:
        size: width of the result.
        tokens: number of embeddings after the feature.
    """

    def __init__(self, size: int, tokens: int) -> None:
        super().__init__()
        self.linear = nn.Linear((1 + tokens) * size, size)
        self.res_connection = nn.Linear((1 + tokens) * size, size)

    def forward(self, x: Tensor) -> Tensor:
        """(…, (1 + tokens) · size) → (…, size)."""
        result: Tensor = self.res_connection(x) + nn.functional.silu(self.linear(x))
        return result


class PublishedHydraNetwork(ParallelNetwork):
    """K times: a block over [feature, embeddings of the path], residual blocks, an LM head."""

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.heads = nn.ModuleList(
            nn.Sequential(ReducingBlock(size, i + 1), *(ResidualBlock(size) for _ in range(config.num_blocks - 1)))
            for i in range(config.num_heads)
        )
        self.lm_heads = _lm_heads(config, bias=True)

    def stream(self, head: int, final: Tensor, embedded: Tensor) -> Tensor:
        """Returns the logits of one head, (…, V); arguments as `HydraNetwork.read`."""
        read = torch.cat((final, embedded.flatten(-2)), dim=-1)
        result: Tensor = self.lm_heads[head](self.heads[head](read))
        return result


def _lm_heads(config: ParallelConfig, bias: bool) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(config.hidden_size, config.vocab_size, bias=bias) for _ in range(config.num_heads))
