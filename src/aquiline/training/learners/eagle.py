"""Trains EAGLE heads: runs micro-batches through the unrolled draft network to a loss.

Position t of step i predicts x[t+2+i] from the target's distribution at t+1+i. It counts where that
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

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from aquiline.checkpoints.eagle.safeailab import write_head
from aquiline.drafters.coupled import agreement
from aquiline.drafters.eagle_network import DraftHead, Eagle3Network, EagleNetwork, Network
from aquiline.targets.rope import RotaryTable
from aquiline.targets.target import Feature, Target
from aquiline.training.features import compute_features
from aquiline.training.learners.eagle_start import fit_fusion
from aquiline.training.learners.learner import GAMMAS, RANKS, Acceptance, Example, Ranks, raced, refresh
from aquiline.training.learners.target_parts import embedding_table, read_out_rows
from aquiline.training.learners.unroll import block_mask, unroll
from aquiline.training.losses import distribution_loss, feature_loss, restricted_probs


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """B padded or packed sequences of T feature positions, unrolled for some steps.

    Attributes:
        embedded: per step, (B, T, H) embeddings of x[t+1+i].
        features: (B, T, F).
        positions: (B, T) int64.
        block_mask: (B, T, T) additive, or None for causal attention.
        counted: per step, (N_i,) int64 flat positions that count.
        wanted: per step, (N_i,) int64 index into `final` of the feature whose distribution each should predict.
        final: (M, H) "final" features of the target positions u.
    """

    embedded: tuple[Tensor, ...]
    features: Tensor
    positions: Tensor
    block_mask: Tensor | None
    counted: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...]
    final: Tensor


def counts(masks: Sequence[Tensor], steps: int) -> list[int]:
    """Positions that count in each step, over whole conversations."""
    return [sum(int(mask[2 + step :].sum()) for mask in masks) for step in range(steps)]


def build_micro_batch(examples: Sequence[Example], embedding: Tensor, steps: int, *, pack: bool = False) -> MicroBatch:
    """Lays out conversations side by side, or in one sequence with a block mask.

    Args:
        examples: conversations of at least 2 tokens.
        embedding: (V, H) frozen embedding.
        steps: unrolled steps.
        pack: one sequence.
    """
    sizes = [len(example.tokens) - 1 for example in examples]
    shape = (1, sum(sizes)) if pack else (len(sizes), max(sizes))
    count, device = shape[0] * shape[1], examples[0].tokens.device
    tokens = torch.zeros(steps, count, dtype=torch.int64, device=device)
    features = examples[0].features.new_zeros(count, examples[0].features.shape[1])
    positions = torch.zeros(count, dtype=torch.int64, device=device)
    segments = torch.full_like(positions, -1)
    counted, wanted = ([list[Tensor]() for _ in range(steps)] for _ in range(2))
    finals, start, held = list[Tensor](), 0, 0
    for number, (example, size) in enumerate(zip(examples, sizes, strict=True)):
        span = slice(start, start + size)
        features[span], segments[span] = example.features[:size], number
        positions[span] = torch.arange(size, device=device)
        targets = example.mask[2:].nonzero()[:, 0] + 1
        finals.append(example.final[targets])
        for step in range(steps):
            shifted = example.tokens[1 + step :][:size]
            tokens[step, start : start + len(shifted)] = shifted
            order = (targets >= 1 + step).nonzero()[:, 0]
            counted[step].append(targets[order] - 1 - step + start)
            wanted[step].append(order + held)
        held, start = held + len(targets), start + (size if pack else shape[1])
    return MicroBatch(
        embedded=tuple(nn.functional.embedding(t.view(shape), embedding) for t in tokens),
        features=features.view(*shape, -1),
        positions=positions.view(shape),
        block_mask=block_mask(segments.view(shape), features.dtype) if pack else None,
        counted=tuple(torch.cat(c) for c in counted),
        wanted=tuple(torch.cat(w) for w in wanted),
        final=torch.cat(finals),
    )


@dataclass(eq=False)
class EagleLearner:
    """An EAGLE head in training; a `Learner`.

    Attributes:
        head: with float32 master weights, or a replica in the compute dtype.
        target: frozen.
        target_head: (Vd, H) rows of its LM head, in the compute dtype.
        embedding: (V, H) its embeddings.
        rule: of the distributions, see `aquiline.training.losses.distribution_loss`.
        token_weight: weight of the distributions' loss.
        feature_weight: weight of SmoothL1 between the "final" feature and the stream of EAGLE-1/2 or the normed stream
            of EAGLE-3; 0 for none.
        steps: unrolled steps.
        packs: put conversations into one sequence with a block mask.
        recompute: gradient checkpointing, see `unroll`.
        fit_positions: positions for `fit`; 0 for none.
    """

    head: DraftHead
    target: Target
    target_head: Tensor
    embedding: Tensor
    rule: str = "kl"
    token_weight: float = 1.0
    feature_weight: float = 0.0
    steps: int = 1
    packs: bool = False
    recompute: bool = False
    fit_positions: int = 0

    def __post_init__(self) -> None:
        rope = self.head.config.layer.rope
        self._rotary = RotaryTable(rope, self.target_head.dtype, self.target_head.device)

    @property
    def network(self) -> Network:
        return self.head.network

    @property
    def features(self) -> tuple[Feature, ...]:
        return self.head.config.features

    @property
    def depths(self) -> int:
        return self.steps

    @property
    def fingerprint(self) -> str:
        return self.head.target_fingerprint or ""

    def counts(self, masks: Sequence[Tensor]) -> list[int]:
        return counts(masks, self.steps)

    def batch(self, examples: Sequence[Example]) -> MicroBatch:
        return build_micro_batch(examples, self.embedding, self.steps, pack=self.packs)

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
        """Logits of a stream over the drafted tokens; EAGLE-1 reads through the target's whole LM head."""
        if isinstance(self.network, Eagle3Network):
            return self.network.logits(stream)
        return stream @ self._whole_head.t()

    @cached_property
    def _whole_head(self) -> Tensor:
        return read_out_rows(self.target, None)

    def loss(self, batch: MicroBatch, scales: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
        probs, best_target = restricted_probs(batch.final, self.target_head)
        picked = [
            stream.flatten(0, 1).index_select(0, positions)
            for stream, positions in zip(self.streams(batch), batch.counted, strict=True)
        ]
        hidden, index = torch.cat(picked), torch.cat(batch.wanted)
        sizes = [len(positions) for positions in batch.counted]
        scale = torch.cat([torch.full((n,), s, device=hidden.device) for n, s in zip(sizes, scales, strict=True)])
        weight, read_out = self.target_head, hidden
        if isinstance(self.network, Eagle3Network):
            weight, read_out = self.network.lm_head.weight, self.network.norm(hidden)
        loss, losses, best = distribution_loss(read_out, weight, probs, index, scale * self.token_weight, self.rule)
        if self.feature_weight:
            loss = loss + self.feature_weight * feature_loss(read_out, batch.final[index], scale)
        hits = best == best_target[index]
        totals = torch.stack([part.sum() for part in torch.split(losses, sizes)])
        right = torch.stack([part.sum() for part in torch.split(hits, sizes)])
        return loss, totals, right.float()

    def replica(self) -> EagleLearner:
        network = type(self.network)(self.network.config).to(self.target_head)
        return refresh(dataclasses.replace(self, head=dataclasses.replace(self.head, network=network)), self)

    def fit(self, examples: Iterable[Example]) -> str:
        network, given = self.network, list(examples)
        assert isinstance(network, EagleNetwork)
        # Position 0 is left out: the first token's states are unlike all others.
        tokens = torch.cat([e.tokens[2:] for e in given])
        now, after = torch.cat([e.final[1:-1] for e in given]), torch.cat([e.final[2:] for e in given])
        share = fit_fusion(network, self.target.embed(tokens), now, after)
        return f"the fusing linear explains {share:.0%} of the next feature's variance"

    def measure(self, tokens: Tensor, mask: Tensor) -> Ranks:
        config, steps = self.head.config, max(5, self.steps + 1)
        both = compute_features(self.target, tokens, tuple(dict.fromkeys((*config.features, "final"))))
        width = config.target_hidden_size * len(config.features)
        example = Example(tokens, mask, both[:, :width], both[:, -config.target_hidden_size :])
        micro = build_micro_batch([example], self.embedding, steps)
        best, confidence, first = self._best(micro)
        said = self.target.project(example.final)
        truth, at = said.argmax(-1), raced(mask[2:])
        coupled = agreement(first[at], said[at + 1].float(), GAMMAS, self.head.draft_to_target)
        size = len(tokens) - 1
        rank = torch.full((steps, size), RANKS, device=tokens.device)
        valid = torch.zeros(steps, size, dtype=torch.bool, device=tokens.device)
        greedy = torch.zeros_like(valid)
        for i in range(min(steps, size - 1)):
            held = size - 1 - i  # positions whose predicted token x[t+2+i] exists
            wanted = truth[1 + i : 1 + i + held]
            found = best[i, :held] == wanted[:, None]
            rank[i, :held] = torch.where(found.any(-1), found.int().argmax(-1), RANKS)
            valid[i, :held] = mask[2 + i :]
            greedy[i, :held] = tokens[2 + i :] == wanted
        return Ranks(rank, valid, greedy, confidence, coupled)

    def _best(self, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Target ids of the best drafts (steps, T, RANKS), and the first step's confidence (T,) and logits (T, Vd)."""
        best, confidence, first, vocabulary = [], torch.empty(0), torch.empty(0), self.head.draft_to_target
        for i, stream in enumerate(self.streams(micro)):
            logits = self.logits(stream[0]).float()
            ids = logits.topk(min(RANKS, logits.shape[-1])).indices
            if i == 0:
                confidence, first = torch.softmax(logits, dim=-1).amax(-1), logits
            best.append(ids if vocabulary is None else vocabulary.to(ids)[ids])
        return torch.stack(best), confidence, first

    def describe(self) -> str:
        config = self.head.config
        return (
            f"Drafts {config.draft_vocab_size:,} of {config.vocab_size:,} tokens from the target features "
            f"{', '.join(map(str, config.features))}. Layout: SafeAILab."
        )

    def save(self, folder: Path, measured: Acceptance | None) -> None:
        gamma = measured.gamma if measured else None
        write_head(folder, dataclasses.replace(self.head, gamma=gamma or self.head.gamma))


def learn_head(target: Target, head: DraftHead) -> EagleLearner:
    """Makes a replica of a finished head, to be measured; its loss is over the tokens that it drafts."""
    rows = read_out_rows(target, head.draft_to_target)
    return EagleLearner(head, target, rows, embedding_table(target)).replica()
