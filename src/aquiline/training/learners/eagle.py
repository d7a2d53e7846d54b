"""One micro-batch through the unrolled draft network to a loss.

Row t of step i predicts x[t+2+i] from the target's distribution at t+1+i. It counts where that
predicted token is the assistant's (differs: the reference masks by the token of row t, which
drops the answer's first tokens and runs past its end)::

    tokens   x0 x1 x2 x3 x4        u = t+1+i ranges over positions whose successor is the
    mask      0  0  1  1  1        assistant's: u = 1, 2, 3; step 0 counts rows t = 0, 1, 2,
                                   step 1 rows t = 0, 1 (for u = 2, 3)

The target's distribution is restricted to the draft vocabulary and renormalised. Positions
whose most probable token is outside count as well (differs: the reference drops them, which
costs a whole LM head; they are < 1 % at 8192 ids).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aquiline.drafters.eagle_network import Eagle3Network, Network
from aquiline.targets.rope import RotaryTable
from aquiline.training.learners.unroll import block_mask, unroll
from aquiline.training.losses import distribution_loss, feature_loss, restricted_probs


@dataclass(frozen=True, eq=False)
class Example:
    """A conversation with its features.

    Attributes:
        tokens: (n,) int64.
        mask: (n,) bool, the token is the assistant's.
        features: (n, F) what the head reads.
        final: (n, H) the target's "final" feature.
    """

    tokens: Tensor
    mask: Tensor
    features: Tensor
    final: Tensor


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """B padded or packed rows of T feature positions, unrolled for some steps.

    Attributes:
        embedded: per step, (B, T, H) embeddings of x[t+1+i].
        features: (B, T, F).
        positions: (B, T) int64.
        block_mask: (B, T, T) additive, or None for causal rows.
        rows: per step, (N_i,) int64 flat rows that count.
        wanted: per step, (N_i,) int64 index into `final` of what each should predict.
        final: (M, H) "final" features of the target positions u.
    """

    embedded: tuple[Tensor, ...]
    features: Tensor
    positions: Tensor
    block_mask: Tensor | None
    rows: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...]
    final: Tensor


def counts(masks: Sequence[Tensor], steps: int) -> list[int]:
    """Rows that count in each step, over whole conversations."""
    return [sum(int(mask[2 + step :].sum()) for mask in masks) for step in range(steps)]


def build_micro_batch(examples: Sequence[Example], embedding: Tensor, steps: int, *, pack: bool = False) -> MicroBatch:
    """Lays conversations out as rows.

    Args:
        examples: conversations of at least 2 tokens.
        embedding: (V, H) frozen embedding.
        steps: unrolled steps.
        pack: put all into one row, with a block mask, instead of padding.
    """
    sizes = [len(example.tokens) - 1 for example in examples]
    width = sum(sizes) if pack else max(sizes)
    shape = (1 if pack else len(sizes), width)
    device = examples[0].tokens.device
    tokens = torch.zeros(steps, shape[0] * width, dtype=torch.int64, device=device)
    features = examples[0].features.new_zeros(shape[0] * width, examples[0].features.shape[1])
    positions = torch.zeros(shape[0] * width, dtype=torch.int64, device=device)
    segments = torch.full_like(positions, -1)
    rows: list[list[Tensor]] = [[] for _ in range(steps)]
    wanted: list[list[Tensor]] = [[] for _ in range(steps)]
    finals = []
    start = held = 0
    for number, (example, size) in enumerate(zip(examples, sizes, strict=True)):
        span = slice(start, start + size)
        features[span] = example.features[:size]
        positions[span] = torch.arange(size, device=device)
        segments[span] = number
        for step in range(steps):
            shifted = example.tokens[1 + step :][:size]
            tokens[step, start : start + len(shifted)] = shifted
        targets = example.mask[2:].nonzero()[:, 0] + 1
        finals.append(example.final[targets])
        for step in range(steps):
            order = (targets >= 1 + step).nonzero()[:, 0]
            rows[step].append(targets[order] - 1 - step + start)
            wanted[step].append(order + held)
        held += len(targets)
        start += size if pack else width
    return MicroBatch(
        embedded=tuple(nn.functional.embedding(t.view(shape), embedding) for t in tokens),
        features=features.view(*shape, -1),
        positions=positions.view(shape),
        block_mask=block_mask(segments.view(shape), features.dtype) if pack else None,
        rows=tuple(torch.cat(r) for r in rows),
        wanted=tuple(torch.cat(w) for w in wanted),
        final=torch.cat(finals),
    )


@dataclass(frozen=True)
class LossSettings:
    """What a head is trained on.

    Attributes:
        rule: of the distributions, see `aquiline.training.losses.distribution_loss`.
        token_weight: weight of the distributions' loss.
        feature_weight: weight of SmoothL1 between the "final" feature and what stands for it: the
            stream of EAGLE-1/2, the normed stream of EAGLE-3; 0 for none.
    """

    rule: str = "kl"
    token_weight: float = 1.0
    feature_weight: float = 0.0


class Learner(nn.Module):
    """The network being trained together with what its loss reads.

    Args:
        network: float32 master weights, or a replica in the compute dtype.
        target_head: (Vd, H) rows of the target's LM head, in the compute dtype; not trained.
        loss: what it is trained on.
        recompute: gradient checkpointing, see `unroll`.
    """

    def __init__(
        self, network: Network, target_head: Tensor, loss: LossSettings | None = None, *, recompute: bool = False
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.network = network
        self.loss = loss or LossSettings()
        self._constants = (target_head,)  # in a tuple: not a parameter, not a buffer
        self._rotary = RotaryTable(network.config.layer.rope, target_head.dtype, target_head.device)

    @property
    def target_head(self) -> Tensor:
        """Rows of the target's LM head; its dtype is the compute dtype."""
        return self._constants[0]

    def streams(self, micro: MicroBatch) -> list[Tensor]:
        """Unrolls the network; per step (B, T, H)."""
        hidden = self.network.fuse(micro.features)
        return unroll(
            self.network,
            micro.embedded,
            hidden,
            micro.positions,
            self._rotary,
            block_mask=micro.block_mask,
            recompute=self.recompute,
        )

    def logits(self, stream: Tensor) -> Tensor:
        """Logits of a stream over the draft vocabulary; EAGLE-1 reads through the target's head."""
        if isinstance(self.network, Eagle3Network):
            return self.network.logits(stream)
        return stream @ self.target_head.t()

    def forward(self, micro: MicroBatch, scales: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of a micro-batch.

        Args:
            micro: the micro-batch.
            scales: per step, the weight of each row that counts.

        Returns:
            Scalar loss; per step the summed loss of the distributions and the hits (both (steps,) float32).
        """
        probs, best_target = restricted_probs(micro.final, self.target_head)
        picked = [
            stream.flatten(0, 1).index_select(0, rows)
            for stream, rows in zip(self.streams(micro), micro.rows, strict=True)
        ]
        hidden, index = torch.cat(picked), torch.cat(micro.wanted)
        scale = torch.cat([torch.full((len(r),), s, device=r.device) for r, s in zip(micro.rows, scales, strict=True)])
        weight, read_out = self.target_head, hidden
        if isinstance(self.network, Eagle3Network):
            weight, read_out = self.network.lm_head.weight, self.network.norm(hidden)
        token, rows, best = distribution_loss(
            read_out, weight, probs, index, scale * self.loss.token_weight, self.loss.rule
        )
        loss = token
        if self.loss.feature_weight:
            loss = loss + self.loss.feature_weight * feature_loss(read_out, micro.final[index], scale)
        hits = best == best_target[index]
        sizes = [len(r) for r in micro.rows]
        totals = torch.stack([part.sum() for part in torch.split(rows, sizes)])
        right = torch.stack([part.sum() for part in torch.split(hits, sizes)])
        return loss, totals, right.float()


def replicate(learner: Learner) -> Learner:
    """A copy in the compute dtype, for one worker; `refresh` brings it up to date."""
    network = type(learner.network)(learner.network.config).to(learner.target_head)
    replica = Learner(network, learner.target_head, learner.loss, recompute=learner.recompute)
    refresh(replica, learner)
    return replica


@torch.no_grad()
def refresh(replica: Learner, learner: Learner) -> None:
    """Copies the master weights into a replica."""
    for mine, master in zip(replica.parameters(), learner.parameters(), strict=True):
        mine.copy_(master)


def gradients(
    learner: Learner, micro: MicroBatch, scales: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Loss, statistics and the gradient of each parameter, in order; see `Learner.forward`."""
    loss, totals, hits = learner(micro, scales)
    grads = torch.autograd.grad(loss, list(learner.parameters()), materialize_grads=True)
    return loss.detach(), totals, hits, list(grads)
