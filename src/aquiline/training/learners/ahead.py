"""Computes losses and ranks of predictions some tokens ahead, for parallel heads and small models.

At position t and depth i (from 0) heads predict the token at t + i + 2 (the root t + 1 is known), a small model
the one at t + 1; the teacher is the target's distribution at the position before. Only tokens of the assistant
count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.drafters.coupled import agreement
from aquiline.targets.decoder import Decoder
from aquiline.training.features import compute_features
from aquiline.training.learners.learner import GAMMAS, RANKS, Example, Ranks, raced
from aquiline.training.losses import distribution_loss, restricted_probs

_BLOCK = 256  # positions whose logits over the whole vocabulary are held at once


@dataclass(frozen=True, eq=False)
class TextBatch:
    """Conversations one after another.

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


def text_batch(examples: Sequence[Example]) -> TextBatch:
    """Lays conversations out one after another."""
    return TextBatch(
        tokens=torch.cat([example.tokens for example in examples]),
        mask=torch.cat([example.mask for example in examples]),
        final=torch.cat([example.final for example in examples]),
        lengths=tuple(len(example.tokens) for example in examples),
    )


def held_out_batch(target: Decoder, tokens: Tensor, mask: Tensor) -> tuple[TextBatch, Tensor]:
    """Lays out one conversation to be measured.

    Args:
        target: computes its features.
        tokens: (n,) int64.
        mask: (n,) bool, the token is the assistant's.

    Returns:
        The batch, and the target's (n, V) logits after each position.
    """
    final = compute_features(target, tokens, ("final",))
    return text_batch([Example(tokens, mask, final, final)]), target.project(final)


def counted(mask: Tensor, ahead: int) -> Tensor:
    """(n,) bool of one conversation: the `ahead` tokens after the position are all the assistant's."""
    result = torch.zeros_like(mask)
    if len(mask) > ahead:
        runs = mask[1:].unfold(0, ahead, 1).all(-1)  # entry t: tokens t + 1 … t + ahead
        result[: len(runs)] = runs
    return result


def counts_ahead(masks: Sequence[Tensor], first: int, depths: int) -> list[int]:
    """Per depth, how many positions of these conversations count."""
    return [sum(int(counted(mask, first + depth).sum()) for mask in masks) for depth in range(depths)]


def positions_that_count(batch: TextBatch, first: int, depths: int) -> list[Tensor]:
    """Per depth, the (N_i,) positions t whose tokens up to the predicted one are all the assistant's.

    Args:
        batch: the conversations.
        first: how many tokens ahead depth 0 predicts: 2 for heads, 1 for a small model.
        depths: how many.
    """
    masks = torch.split(batch.mask, list(batch.lengths))
    return [torch.cat([counted(mask, first + depth) for mask in masks]).nonzero()[:, 0] for depth in range(depths)]


def loss_ahead(
    streams: Sequence[Tensor],
    batch: TextBatch,
    first: int,
    read_out: Tensor,
    target_head: Tensor,
    scales: Sequence[float],
    rule: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of predictions ahead.

    Args:
        streams: per depth, (n, H) of all positions.
        batch: the conversations.
        first: see `positions_that_count`.
        read_out: (Vd, H) matrix that turns a stream into logits.
        target_head: (Vd, H) rows of the target's LM head.
        scales: per depth, the weight of each position that counts.
        rule: of the distributions, see `aquiline.training.losses.distribution_loss`.

    Returns:
        See `aquiline.training.learners.learner.Learner.loss`.
    """
    counting = positions_that_count(batch, first, len(streams))
    needed = torch.cat([t + first - 1 + depth for depth, t in enumerate(counting)])
    positions, index = torch.unique(needed, return_inverse=True)
    probs, best_target = restricted_probs(batch.final[positions], target_head)
    hidden = torch.cat([stream[t] for stream, t in zip(streams, counting, strict=True)])
    scale = torch.cat([torch.full((len(t),), s, device=t.device) for t, s in zip(counting, scales, strict=True)])
    loss, losses, best = distribution_loss(hidden, read_out, probs, index, scale, rule)
    hits = best == best_target[index]
    both = torch.stack((losses, hits.to(losses.dtype)))
    parts = torch.split(both, [len(t) for t in counting], dim=1)
    sums = torch.stack([part.sum(1) for part in parts], dim=1)
    return loss, sums[0], sums[1]


def ranks_ahead(
    streams: Sequence[Tensor],
    batch: TextBatch,
    first: int,
    read_out: Tensor,
    vocabulary: Tensor | None,
    said: Tensor,
    depths: int,
) -> Ranks:
    """Ranks the target's own tokens among predictions ahead in one conversation.

    A draft is right where it is the target's arg-max, and the text up to there is the path on which it
    was made. Positions whose text is not the target's do not count.

    Args:
        streams: per depth, (n, H) of all positions; a model that drafts in turn has one.
        batch: the conversation.
        first: see `positions_that_count`.
        read_out: (Vd, H) matrix that turns a stream into logits.
        vocabulary: (Vd,) int64 target ids of the draft ids, or None for all.
        said: (n, V) the target's logits after each position.
        depths: to compare.
    """
    truth = said.argmax(-1)
    own = torch.zeros_like(batch.mask)  # entry u: the token at u is the target's own choice
    own[1:] = truth[:-1] == batch.tokens[1:]
    valid = [counted(batch.mask, first + depth) for depth in range(depths)]
    for depth in range(depths):
        if first + depth > 1:
            valid[depth] &= counted(own, first + depth - 1)
    rank, confidence = _ranks(streams, read_out, vocabulary, truth, first, depths)
    on_path, at = torch.stack(valid), raced(counted(batch.mask, first))
    logits = (streams[0][at] @ read_out.t()).float()
    coupled = agreement(logits, said[at + first - 1].float(), GAMMAS, vocabulary)
    return Ranks(rank, on_path, torch.ones_like(on_path), confidence, coupled)


def _ranks(
    streams: Sequence[Tensor], read_out: Tensor, vocabulary: Tensor | None, truth: Tensor, first: int, depths: int
) -> tuple[Tensor, Tensor]:
    """(depths, n) int64 rank of the target's token at each position, and (n,) confidence of the first depth."""
    count, size, device = len(truth), len(read_out), truth.device
    ids = torch.arange(size, device=device) if vocabulary is None else vocabulary.to(device)
    draft_id = torch.full((int(max(int(ids.max()), int(truth.max()))) + 1,), -1, device=device)
    draft_id[ids] = torch.arange(size, device=device)
    result = torch.full((depths, count), RANKS, device=device)
    confidence = torch.zeros(count, device=device)
    for depth, stream in enumerate(streams):
        wanted = draft_id[truth[first - 1 + depth :]]
        for start in range(0, len(wanted), _BLOCK):
            part = wanted[start : start + _BLOCK]
            block = slice(start, start + len(part))
            logits = (stream[block] @ read_out.t()).float()
            score = logits.gather(1, part.clamp(min=0)[:, None])
            rank = (logits > score).sum(1).clamp(max=RANKS)
            result[depth, block] = torch.where(part < 0, RANKS, rank)
            if depth == 0:
                confidence[block] = torch.softmax(logits, dim=-1).amax(-1)
    for depth in range(len(streams), depths):  # a small model: its next drafts are its next positions'
        result[depth, : count - depth] = result[0, depth:]
    return result, confidence
