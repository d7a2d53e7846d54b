"""Trains Medusa and Hydra heads: K heads that read the target's "final" feature.

Before the first step they can be fitted by least squares: the stream of the head of depth i then approximates the
target's own feature at t + i + 1, which the LM head reads. The best linear map from the head's input to that feature
is the solution of one linear system; it takes seconds and is worth many thousand positions of training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from aquiline.checkpoints.parallel import build_parallel_network, write_parallel_heads
from aquiline.drafters.parallel import ParallelHeads
from aquiline.drafters.parallel_network import (
    HydraNetwork,
    LinearHead,
    MedusaNetwork,
    ParallelConfig,
    ParallelNetwork,
)
from aquiline.targets.decoder import Decoder
from aquiline.targets.target import Feature
from aquiline.training.learners.ahead import (
    TextBatch,
    counts_ahead,
    held_out_batch,
    loss_ahead,
    positions_that_count,
    ranks_ahead,
    text_batch,
)
from aquiline.training.learners.learner import Acceptance, Example, Ranks, refresh
from aquiline.training.settings import TrainSettings

_FIRST = 2  # depth 0 predicts the token after the root
_RIDGE = 1e-3  # of the mean of the inputs' second moments


@dataclass(eq=False)
class ParallelLearner:
    """Medusa or Hydra heads in training; a `Learner`.

    Attributes:
        network: the heads: float32 master weights, or a replica in the compute dtype.
        target: frozen.
        target_head: (Vd, H) rows of its LM head, in the compute dtype.
        vocabulary: (Vd,) int64 target ids of the draft ids, or None for all.
        fingerprint: of the target.
        rule: of the distributions, see `aquiline.training.losses.distribution_loss`.
        fit_positions: positions for `fit`; 0 for none.
    """

    network: ParallelNetwork
    target: Decoder
    target_head: Tensor
    vocabulary: Tensor | None
    fingerprint: str
    rule: str = "kl"
    fit_positions: int = 0
    packs: bool = True
    features: tuple[Feature, ...] = ("final",)

    @property
    def depths(self) -> int:
        return self.network.config.num_heads

    @property
    def read_out(self) -> Tensor:
        """(Vd, H) matrix that turns a stream into logits."""
        return self.network.lm_head.weight if self.network.config.own_lm_head else self.target_head

    def counts(self, masks: Sequence[Tensor]) -> list[int]:
        return counts_ahead(masks, _FIRST, self.depths)

    def batch(self, examples: Sequence[Example]) -> TextBatch:
        return text_batch(examples)

    def streams(self, batch: TextBatch) -> list[Tensor]:
        """Per depth, (n, H) streams of all positions."""
        return [head(read) for head, read in zip(head_modules(self.network), self.reads(batch), strict=True)]

    def reads(self, batch: TextBatch) -> list[Tensor]:
        """Per depth, the (n, inputs) of its head; near an end the tokens wrap around and do not count."""
        network = self.network
        if isinstance(network, MedusaNetwork):
            return [network.read(depth, batch.final) for depth in range(self.depths)]
        assert isinstance(network, HydraNetwork)
        embedded = self.target.embed(batch.tokens).to(batch.final.dtype)
        path = torch.stack([embedded.roll(-1 - i, 0) for i in range(self.depths)], dim=1)
        return [network.read(depth, batch.final, path[:, : depth + 1]) for depth in range(self.depths)]

    def loss(self, batch: TextBatch, scales: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
        streams = self.streams(batch)
        return loss_ahead(streams, batch, _FIRST, self.read_out, self.target_head, scales, self.rule)

    def replica(self) -> ParallelLearner:
        network = type(self.network)(self.network.config).to(self.target_head)
        return refresh(dataclasses.replace(self, network=network), self)

    @torch.no_grad()
    def fit(self, examples: Iterable[Example]) -> str:
        moments: list[tuple[Tensor, Tensor] | None] = [None] * self.depths
        positions = 0
        for example in examples:
            batch = text_batch([dataclasses.replace(example, final=example.final.float())])
            counting = positions_that_count(batch, _FIRST, self.depths)
            positions += len(counting[0])
            for depth, read in enumerate(self.reads(batch)):
                t = counting[depth]
                inputs = torch.cat((read[t], torch.ones(len(t), 1, device=read.device)), dim=1)
                wanted = batch.final[t + _FIRST - 1 + depth]
                both = inputs.t() @ inputs, inputs.t() @ wanted
                known = moments[depth]
                moments[depth] = both if known is None else (known[0] + both[0], known[1] + both[1])
        for head, sums in zip(head_modules(self.network), moments, strict=True):
            if sums is not None and float(sums[0][-1, -1]):  # else no text is that long: the head keeps its start
                _solve(head, *sums)
        return f"the heads start as the regression of the feature ahead over {positions:,} positions"

    def measure(self, tokens: Tensor, mask: Tensor) -> Ranks:
        batch, said = held_out_batch(self.target, tokens, mask)
        return ranks_ahead(self.streams(batch), batch, _FIRST, self.read_out, self.vocabulary, said, self.depths)

    def describe(self) -> str:
        config = self.network.config
        return (
            f"{config.num_heads} heads draft {config.draft_vocab_size:,} of {config.vocab_size:,} tokens from the "
            "target's final feature" + (" and the tokens drafted before." if config.kind == "hydra" else ".")
        )

    def save(self, folder: Path, measured: Acceptance | None) -> None:
        by_rank = measured.by_rank if measured else ()
        accuracies = tuple(tuple(round(value, 4) for value in row) for row in by_rank)
        self.network.config = replace(self.network.config, accuracies=accuracies)
        gamma = measured.gamma if measured else None
        heads = ParallelHeads(self.network, self.vocabulary, self.fingerprint, gamma)
        write_parallel_heads(folder, heads)


def new_parallel(
    settings: TrainSettings, target: Decoder, target_head: Tensor, vocabulary: Tensor | None, fingerprint: str
) -> ParallelLearner:
    """Makes untrained heads, each the identity on the feature.

    Args:
        settings: kind, sizes, loss and seed.
        target: the target.
        target_head: (Vd, H) rows of its LM head, all or those of the draft vocabulary.
        vocabulary: (Vd,) int64 target ids of the draft ids, or None for all.
        fingerprint: of the target.
    """
    torch.manual_seed(settings.seed)
    config = ParallelConfig(
        kind=settings.kind,
        num_heads=settings.num_heads,
        hidden_size=target.shape.hidden_size,
        vocab_size=target.shape.vocab_size,
        draft_vocab_size=len(target_head),
        num_blocks=settings.num_blocks,
        own_lm_head=settings.own_lm_head,
        rms_norm_eps=target.config.layer.rms_norm_eps,
    )
    network = build_parallel_network(config)
    if config.own_lm_head:
        with torch.no_grad():
            network.lm_head.weight.copy_(target_head)
    network.float().to(target.device).train()
    return ParallelLearner(
        network, target, target_head, vocabulary, fingerprint, settings.loss, settings.regress_positions
    )


def head_modules(network: ParallelNetwork) -> list[LinearHead]:
    """The heads of a network, by depth."""
    return cast("list[LinearHead]", list(cast(nn.ModuleList, network.heads)))


def _solve(head: LinearHead, squares: Tensor, products: Tensor) -> None:
    """Writes the least-squares map into a head; the LM head reads its stream as it reads the feature."""
    squares, products = squares.cpu().double(), products.cpu().double()  # MPS has no float64.
    ridge = _RIDGE * squares.diagonal().mean() * torch.eye(len(squares), dtype=torch.float64)
    solution = torch.linalg.solve(squares + ridge, products)
    head.linear.weight.copy_(solution[:-1].t())
    head.linear.bias.copy_(solution[-1])
