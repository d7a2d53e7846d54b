"""Acceptance of a draft head on held-out conversations, without an engine.

On the target's own greedy words the unrolled steps are the draft chain as long as it is right:
the token that step i+1 reads is the one that step i should have drafted. So the chain from row t
reaches depth n+1 if its first n+1 steps are all right, and n-α = P(depth n+1 | depth n). On other
people's words that holds only while they are also the target's; a chain is followed no further
than that. Chains begin at every assistant token here, in an engine where the last one ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.drafters.eagle_network import DraftHead
from aquiline.drafters.trees import EAGLE1_PATHS
from aquiline.targets.target import Target
from aquiline.training.features import compute_features
from aquiline.training.learners.eagle import Example, Learner, MicroBatch, build_micro_batch, replicate
from aquiline.training.learners.target_parts import embedding_table, read_out_rows

_TOP = 10
_BINS = 10


@dataclass(frozen=True)
class Acceptance:
    """Measured acceptance.

    Attributes:
        alphas: n-α for n = 0 … steps - 1.
        accuracy: per step, how often the draft's token is the target's, teacher-forced.
        rows: rows that step 0 was measured on.
        tau_chain: tokens per target forward with a chain of 5, the target's own included.
        tau_tree: the same with EAGLE-1's fixed tree.
        calibration: per bin of confidence (0 … 0.1, …): rows, mean confidence, share accepted.
        calibration_error: expected calibration error, Σ share of rows · |confidence − accepted|.
    """

    alphas: list[float]
    accuracy: list[float]
    rows: int
    tau_chain: float
    tau_tree: float
    calibration: list[tuple[int, float, float]]
    calibration_error: float


@dataclass(frozen=True, eq=False)
class _Rows:
    """Per step and row, (steps, T): rank of the target's token among the draft's best, _TOP if
    it is not; whether the row counts; whether the text is the target's own choice there; and
    (T,) the first step's confidence."""

    rank: Tensor
    valid: Tensor
    greedy: Tensor
    confidence: Tensor


@torch.no_grad()
def measure_acceptance(
    target: Target, head: DraftHead, conversations: Iterable[tuple[Tensor, Tensor]], steps: int
) -> Acceptance:
    """Measures a head.

    Args:
        target: the target.
        head: the head, in any dtype; it is run in the target's.
        conversations: (tokens, mask) pairs.
        steps: depths to measure, ≥ 5.
    """
    # An EAGLE-3 head reads its streams out by itself; of the target's it takes the dtype.
    ids = head.draft_to_target if head.config.kind == "eagle3" else None
    learner = replicate(Learner(head.network, read_out_rows(target, ids)))
    embedding = embedding_table(target)
    parts = [
        _measure(learner, target, embedding, head, tokens, mask, steps)
        for tokens, mask in conversations
        if len(tokens) >= 3
    ]
    if not parts:
        raise ValueError("no validation conversation of at least 3 tokens; prepare a larger set")
    rows = _Rows(*(torch.cat(p, dim=-1) for p in zip(*map(_fields, parts), strict=True)))
    right = rows.rank == 0
    alphas, reached = _chain(right, rows)
    first = rows.valid[0]
    calibration, error = _calibration(rows.confidence[first], right[0][first])
    tau_chain, survival = 1.0, 1.0
    for alpha in alphas[:5]:
        survival *= alpha
        tau_chain += survival
    return Acceptance(
        alphas=alphas,
        accuracy=((right & rows.valid).sum(1) / rows.valid.sum(1).clamp(min=1)).tolist(),
        rows=reached,
        tau_chain=tau_chain,
        tau_tree=_tau_tree(rows),
        calibration=calibration,
        calibration_error=error,
    )


def _fields(rows: _Rows) -> tuple[Tensor, ...]:
    return rows.rank, rows.valid, rows.greedy, rows.confidence


def _chain(right: Tensor, rows: _Rows) -> tuple[list[float], int]:
    """n-α, and the rows that chains began at."""
    alphas = []
    alive = torch.ones_like(right[0])
    for n in range(len(right)):
        alive = alive & rows.valid[n]
        accepted = alive & right[n]
        alphas.append(float(accepted.sum() / alive.sum().clamp(min=1)))
        alive = accepted & rows.greedy[n]
    return alphas, int(rows.valid[0].sum())


def _tau_tree(rows: _Rows) -> float:
    """Follows the target's tokens down EAGLE-1's fixed tree by their ranks."""
    paths = set(EAGLE1_PATHS)
    depth = min(max(map(len, paths)), len(rows.rank))
    accepted = total = 0
    for row in rows.valid[0].nonzero()[:, 0].tolist():
        total += 1
        path: tuple[int, ...] = ()
        for n in range(depth):
            if not rows.valid[n, row] or (n and not rows.greedy[n - 1, row]):
                break
            path = (*path, int(rows.rank[n, row]))
            if path not in paths:
                break
            accepted += 1
    return 1 + accepted / max(1, total)


def _calibration(confidence: Tensor, right: Tensor) -> tuple[list[tuple[int, float, float]], float]:
    bins = (confidence * _BINS).long().clamp(max=_BINS - 1)
    table, error = [], 0.0
    for i in range(_BINS):
        inside = bins == i
        count = int(inside.sum())
        mean = float(confidence[inside].mean()) if count else 0.0
        share = float(right[inside].float().mean()) if count else 0.0
        table.append((count, mean, share))
        error += count * abs(mean - share)
    return table, error / max(1, len(confidence))


def _measure(
    learner: Learner, target: Target, embedding: Tensor, head: DraftHead, tokens: Tensor, mask: Tensor, steps: int
) -> _Rows:
    hidden = head.config.target_hidden_size
    wanted = tuple(dict.fromkeys((*head.config.features, "final")))
    both = compute_features(target, tokens, wanted)
    width = hidden * len(head.config.features)
    example = Example(tokens, mask, both[:, :width], both[:, -hidden:])
    rows = len(tokens) - 1
    micro = build_micro_batch([example], embedding, steps)
    best, confidence = _best(learner, micro, head)
    truth = target.project(example.final).argmax(-1)
    rank = torch.full((steps, rows), _TOP, dtype=torch.int64, device=tokens.device)
    valid = torch.zeros(steps, rows, dtype=torch.bool, device=tokens.device)
    greedy = torch.zeros_like(valid)
    for i in range(steps):
        size = rows - 1 - i  # rows whose predicted token x[t+2+i] exists
        if size < 1:
            break
        wanted_token = truth[1 + i : 1 + i + size]
        found = best[i, :size] == wanted_token[:, None]
        rank[i, :size] = torch.where(found.any(-1), found.int().argmax(-1), _TOP)
        valid[i, :size] = mask[2 + i :]
        greedy[i, :size] = tokens[2 + i :] == wanted_token
    return _Rows(rank, valid, greedy, confidence)


def _best(learner: Learner, micro: MicroBatch, head: DraftHead) -> tuple[Tensor, Tensor]:
    """Target ids of the best drafts (steps, T, _TOP), and the first step's confidence (T,)."""
    best, confidence = [], torch.empty(0)
    for i, stream in enumerate(learner.streams(micro)):
        logits = learner.logits(stream[0]).float()
        ids = logits.topk(min(_TOP, logits.shape[-1])).indices
        if i == 0:
            confidence = torch.softmax(logits, dim=-1).amax(-1)
        best.append(ids if head.draft_to_target is None else head.draft_to_target.to(ids)[ids])
    return torch.stack(best), confidence
