"""Acceptance of a draft head on held-out conversations, without an engine.

On the target's own greedy words the unrolled steps are the draft chain as long as it is right:
the token that step i+1 reads is the one that step i should have drafted. So the chain from row t
reaches depth n+1 if its first n+1 steps are all right, and n-α = P(depth n+1 | depth n). On other
people's words that holds only where they are also the target's, and such rows alone count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.drafters.eagle import DraftHead
from aquiline.targets.decoder import Decoder
from aquiline.training.features import compute_features
from aquiline.training.learner import Example, Learner, build_micro_batch, replicate


@dataclass(frozen=True)
class Acceptance:
    """Measured acceptance.

    Attributes:
        alphas: n-α for n = 0 … steps - 1.
        accuracy: per step, how often the draft's token is the target's, teacher-forced.
        rows: rows that step 0 was measured on.
    """

    alphas: list[float]
    accuracy: list[float]
    rows: int


@torch.no_grad()
def measure_acceptance(
    target: Decoder,
    head: DraftHead,
    conversations: Iterable[tuple[Tensor, Tensor]],
    steps: int,
) -> Acceptance:
    """Measures a head.

    Args:
        target: the target.
        head: the head, in any dtype; it is run in the target's.
        conversations: (tokens, mask) pairs.
        steps: depths to measure.
    """
    reached, accepted = torch.zeros(steps), torch.zeros(steps)
    right, counted = torch.zeros(steps), torch.zeros(steps)
    learner = replicate(Learner(head.network, target.lm_head.weight))
    hidden = head.config.target_hidden_size
    for tokens, mask in conversations:
        if len(tokens) < 3:
            continue
        wanted = tuple(dict.fromkeys((*head.config.features, "final")))
        both = compute_features(target, tokens, wanted)
        width = hidden * len(head.config.features)
        example = Example(tokens, mask, both[:, :width], both[:, -hidden:])
        hits, valid, greedy = _hits(learner, target, head, example, steps)
        right += (hits & valid).sum(1)
        counted += valid.sum(1)
        alive = torch.ones(hits.shape[1], dtype=torch.bool)
        for n in range(steps):
            alive = alive & valid[n]
            reached[n] += alive.sum()
            alive = alive & hits[n]
            accepted[n] += alive.sum()
            alive = alive & greedy[n]
    return Acceptance(
        alphas=(accepted / reached.clamp(min=1)).tolist(),
        accuracy=(right / counted.clamp(min=1)).tolist(),
        rows=int(reached[0]),
    )


def _hits(
    learner: Learner,
    target: Decoder,
    head: DraftHead,
    example: Example,
    steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Per step and row: is the draft right, does the row count, is the text greedy there."""
    rows = len(example.tokens) - 1
    micro = build_micro_batch([example], target.embed_tokens.weight, steps)
    best = torch.stack([drafted[0] for drafted in learner.draft(micro)])
    if head.draft_to_target is not None:
        best = head.draft_to_target[best]
    truth = target.project(example.final).argmax(-1)
    hits = torch.zeros(steps, rows, dtype=torch.bool)
    valid, greedy = torch.zeros_like(hits), torch.zeros_like(hits)
    for i in range(steps):
        size = rows - 1 - i  # rows whose predicted token x[t+2+i] exists
        if size < 1:
            break
        hits[i, :size] = best[i, :size] == truth[1 + i : 1 + i + size]
        valid[i, :size] = example.mask[2 + i :]
        greedy[i, :size] = example.tokens[2 + i :] == truth[1 + i : 1 + i + size]
    return hits, valid, greedy
