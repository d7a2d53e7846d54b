"""What Medusa and Hydra heads and small models learn from: the target's distribution ahead.

A student predicts, at feature position t and depth i (from 0), the token at t + i + 2 for heads
(the root t + 1 is known) or t + 1 for a small model; the teacher is the target's distribution at
the position before. Only tokens of the assistant count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from aquiline.drafters.parallel_network import HydraNetwork, LinearHead, MedusaNetwork, ParallelNetwork
from aquiline.targets.decoder import Decoder, DecoderConfig
from aquiline.targets.layers import DecoderLayer, RMSNorm, decoder_layers
from aquiline.training.losses import distribution_loss, restricted_probs


@dataclass(frozen=True, eq=False)
class Lesson:
    """Conversations behind one another.

    Attributes:
        tokens: (n,) int64.
        mask: (n,) bool, the token is the assistant's.
        final: (n, H) the target's "final" feature, in the compute dtype.
        lengths: of the conversations.
    """

    tokens: Tensor
    mask: Tensor
    final: Tensor
    lengths: tuple[int, ...]


def lesson(examples: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Lesson:
    """Lays (tokens, mask, final) of conversations behind one another."""
    lengths = tuple(len(tokens) for tokens, _, _ in examples)
    tokens, mask, final = (torch.cat(parts) for parts in zip(*examples, strict=True))
    return Lesson(tokens, mask, final, lengths)


def counted(mask: Tensor, ahead: int) -> Tensor:
    """(n,) bool of one conversation: the `ahead` tokens after the position are all the assistant's."""
    result = torch.zeros_like(mask)
    if len(mask) > ahead:
        runs = mask[1:].unfold(0, ahead, 1).all(-1)  # entry t: tokens t + 1 … t + ahead
        result[: len(runs)] = runs
    return result


class Student(Protocol):
    """A network that learns from lessons."""

    @property
    def network(self) -> nn.Module:
        """float32 master weights, or a replica in the compute dtype."""
        ...

    depths: int
    """Depths that it predicts from a position in one pass."""

    first: int
    """Depth 0 predicts the token so many positions ahead: 2 for heads, 1 for a small model."""

    @property
    def read_out(self) -> Tensor:
        """(Vd, H) matrix that turns a stream into logits."""
        ...

    def streams(self, given: Lesson) -> list[Tensor]:
        """Per depth, (n, H) streams of all positions."""
        ...

    def replica(self) -> Student:
        """A copy for one worker in the compute dtype."""
        ...


def head_modules(network: ParallelNetwork) -> list[LinearHead]:
    """The heads of a network, by depth, with their type."""
    return cast("list[LinearHead]", list(cast(nn.ModuleList, network.heads)))


class HeadsStudent:
    """Medusa or Hydra heads.

    Args:
        network: the heads.
        target: the target; frozen.
        target_head: (Vd, H) rows of its LM head, in the compute dtype.
    """

    first = 2

    def __init__(self, network: ParallelNetwork, target: Decoder, target_head: Tensor) -> None:
        self.network, self.depths = network, network.config.num_heads
        self._target, self._target_head = target, target_head

    @property
    def read_out(self) -> Tensor:
        """See `Student.read_out`."""
        return self.network.lm_head.weight if self.network.config.own_lm_head else self._target_head

    def streams(self, given: Lesson) -> list[Tensor]:
        """See `Student.streams`."""
        return [head(read) for head, read in zip(head_modules(self.network), self.reads(given), strict=True)]

    def reads(self, given: Lesson) -> list[Tensor]:
        """Per depth, (n, inputs) what its head reads; near an end the tokens wrap around and do not count."""
        network = self.network
        if isinstance(network, MedusaNetwork):
            return [network.read(depth, given.final) for depth in range(self.depths)]
        assert isinstance(network, HydraNetwork)
        embedded = self._target.embed(given.tokens).to(given.final.dtype)
        path = torch.stack([embedded.roll(-1 - i, 0) for i in range(self.depths)], dim=1)
        return [network.read(depth, given.final, path[:, : depth + 1]) for depth in range(self.depths)]

    def replica(self) -> HeadsStudent:
        """See `Student.replica`."""
        copy = type(self.network)(self.network.config).to(self._target_head)
        copy.load_state_dict(self.network.state_dict())
        return HeadsStudent(copy, self._target, self._target_head)


class SmallNetwork(nn.Module):
    """The trainable part of a small decoder: its layers and its norm.

    Args:
        config: of the small decoder.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config.layer) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.layer.hidden_size, config.layer.rms_norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One conversation's embeddings (1, n, H), cos and sin (1, n, dim) → normed streams (n, H)."""
        for rotated, layer in zip(self.config.rotary, decoder_layers(self.layers), strict=True):
            attention = layer.self_attn
            q, k, v = attention.qkv(layer.input_layernorm(hidden), cos if rotated else None, sin if rotated else None)
            group = q.shape[1] // k.shape[1]
            mixed = nn.functional.scaled_dot_product_attention(
                q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True, scale=attention.scale
            )
            hidden = layer.finish(hidden, mixed.transpose(1, 2).flatten(2))
        result: Tensor = self.norm(hidden)[0]
        return result


class SmallModelStudent:
    """A decoder of few layers with the target's embedding and LM head, which stay frozen.

    Args:
        network: the layers and the norm of the small model.
        target: the target; frozen.
        target_head: (Vd, H) rows of its LM head, in the compute dtype.
    """

    depths, first = 1, 1

    def __init__(self, network: SmallNetwork, target: Decoder, target_head: Tensor) -> None:
        self.network, self._target, self._target_head = network, target, target_head

    @property
    def read_out(self) -> Tensor:
        """See `Student.read_out`."""
        return self._target_head

    def streams(self, given: Lesson) -> list[Tensor]:
        """See `Student.streams`; conversations run one by one."""
        parts = []
        for tokens in torch.split(given.tokens, list(given.lengths)):
            cos, sin = self._target.rotary(torch.arange(len(tokens), device=tokens.device)[None], len(tokens))
            parts.append(self.network(self._target.embed(tokens[None]), cos, sin))
        return [torch.cat(parts)]

    def replica(self) -> SmallModelStudent:
        """See `Student.replica`."""
        copy = SmallNetwork(self.network.config).to(self._target_head)
        copy.load_state_dict(self.network.state_dict())
        return SmallModelStudent(copy, self._target, self._target_head)


def rows_that_count(student: Student, given: Lesson) -> list[Tensor]:
    """Per depth, the (N_i,) positions t whose tokens up to the predicted one are all the assistant's."""
    masks = torch.split(given.mask, list(given.lengths))
    return [
        torch.cat([counted(mask, student.first + depth) for mask in masks]).nonzero()[:, 0]
        for depth in range(student.depths)
    ]


def student_loss(
    student: Student, given: Lesson, target_head: Tensor, scales: Sequence[float], rule: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of a lesson.

    Args:
        student: a replica.
        given: the lesson.
        target_head: (Vd, H) rows of the target's LM head.
        scales: per depth, the weight of each row that counts.
        rule: of the distributions, see `aquiline.training.losses.distribution_loss`.

    Returns:
        Scalar loss; per depth the summed loss and the hits, (depths,) float32 each.
    """
    rows = rows_that_count(student, given)
    needed = torch.cat([r + student.first - 1 + depth for depth, r in enumerate(rows)])
    positions, index = torch.unique(needed, return_inverse=True)
    probs, best_target = restricted_probs(given.final[positions], target_head)
    hidden = torch.cat([stream[r] for stream, r in zip(student.streams(given), rows, strict=True)])
    scale = torch.cat([torch.full((len(r),), s, device=r.device) for r, s in zip(rows, scales, strict=True)])
    loss, losses, best = distribution_loss(hidden, student.read_out, probs, index, scale, rule)
    sizes = [len(r) for r in rows]
    hits = best == best_target[index]
    both = torch.stack((losses, hits.to(losses.dtype)))
    sums = torch.stack([part.sum(1) for part in torch.split(both, sizes, dim=1)], dim=1)
    return loss, sums[0], sums[1]
