"""Measures the acceptance of a draft on held-out conversations, without an engine.

On the target's own greedy text the unrolled depths are the draft chain as long as it is right: depth i+1 reads the
token that depth i should have drafted. So the chain from position t reaches depth n+1 if its first n+1 drafts are all
right, and n-α = P(depth n+1 | depth n). On other text this holds only while it is also the target's; a chain is
followed no further. Chains begin at every assistant token here; in an engine, where the last one ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from aquiline.drafters.trees import EAGLE1_PATHS
from aquiline.training.data.dataset import TrainingSet
from aquiline.training.learners.learner import GAMMAS, RANKS, Acceptance, Learner, Ranks

VALIDATION_POSITIONS = 15_000
"""Positions of a validation split that are measured: enough for ± 0.01, few compared with a run."""

_BINS = 10


def validation_texts(data: TrainingSet, max_length: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The first conversations of a validation split, as (tokens, mask).

    Args:
        data: the split.
        max_length: conversations are cut to this many tokens.
        device: of the target.

    Yields:
        At least one, and no more than `VALIDATION_POSITIONS` positions in all after that.
    """
    total = 0
    for row in data:
        tokens = torch.from_numpy(row.input_ids[:max_length]).long().to(device)
        total += len(tokens)
        if total > VALIDATION_POSITIONS and total > len(tokens):
            return
        yield tokens, torch.from_numpy(row.loss_mask[:max_length]).to(device)


@torch.no_grad()
def measure_acceptance(learner: Learner, conversations: Iterable[tuple[Tensor, Tensor]]) -> Acceptance:
    """Measures a head.

    Args:
        learner: a replica in the target's dtype.
        conversations: (tokens, mask) pairs.

    Raises:
        ValueError: if none has 3 tokens.
    """
    parts = [learner.measure(tokens, mask) for tokens, mask in conversations if len(tokens) >= 3]
    if not parts:
        raise ValueError("no validation conversation of at least 3 tokens; prepare a larger set")
    fields = zip(*((p.rank, p.valid, p.greedy, p.confidence, p.coupled) for p in parts), strict=True)
    found = Ranks(*(torch.cat(field, dim=-1) for field in fields))
    right = found.rank == 0
    alphas = _chain(right, found)
    by_rank = _by_rank(found)
    first = found.valid[0]
    calibration, error = _calibration(found.confidence[first], right[0][first])
    tau_chain, survival = 1.0, 1.0
    for alpha in alphas[:5]:
        survival *= alpha
        tau_chain += survival
    return Acceptance(
        alphas=alphas,
        accuracy=[ranks[0] for ranks in by_rank],
        by_rank=by_rank,
        positions=int(first.sum()),
        tau_chain=tau_chain,
        tau_tree=_tau_tree(found),
        calibration=calibration,
        calibration_error=error,
        coupled=dict(zip(GAMMAS, found.coupled.mean(-1).tolist(), strict=True)) if found.coupled.numel() else {},
    )


def _chain(right: Tensor, found: Ranks) -> list[float]:
    """n-α for every n."""
    alphas = []
    alive = torch.ones_like(right[0])
    for n in range(len(right)):
        alive = alive & found.valid[n]
        accepted = alive & right[n]
        alphas.append(float(accepted.sum() / alive.sum().clamp(min=1)))
        alive = accepted & found.greedy[n]
    return alphas


def _by_rank(found: Ranks) -> list[list[float]]:
    counts = [
        torch.bincount(rank[valid].clamp(max=RANKS), minlength=RANKS + 1)[:RANKS] / valid.sum().clamp(min=1)
        for rank, valid in zip(found.rank, found.valid, strict=True)
    ]
    return [each.tolist() for each in counts]


def _tau_tree(found: Ranks) -> float:
    """Follows the target's tokens down EAGLE-1's fixed tree by their ranks."""
    paths = set(EAGLE1_PATHS)
    depth = min(max(map(len, paths)), len(found.rank))
    accepted = total = 0
    for position in found.valid[0].nonzero()[:, 0].tolist():
        total += 1
        path: tuple[int, ...] = ()
        for n in range(depth):
            if not found.valid[n, position] or (n and not found.greedy[n - 1, position]):
                break
            path = (*path, int(found.rank[n, position]))
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
