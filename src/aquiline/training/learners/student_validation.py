"""Acceptance of Medusa and Hydra heads and small models on held-out conversations, without an engine.

On the target's own greedy words a draft is right where it is the target's arg-max, and the text
up to there is the path on which it was made. Rows whose text is not the target's do not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.targets.decoder import Decoder
from aquiline.training.features import compute_features
from aquiline.training.learners.students import Lesson, SmallModelStudent, Student, counted, lesson

RANKS = 10
"""Candidates of each head whose accuracy is measured."""

_SMALL_MODEL_DEPTHS = 5


@dataclass(frozen=True)
class StudentAcceptance:
    """Measured acceptance.

    Attributes:
        alphas: n-α, share of right drafts at depth n + 1 of the chains that were right down to n.
        tau: tokens per target forward of that chain, 1 + Σ Π α.
        accuracies: per depth, how often the candidate of each rank is right on any row that counts.
        rows: chains measured.
    """

    alphas: list[float]
    tau: float
    accuracies: list[list[float]]
    rows: int


@torch.no_grad()
def measure_student(
    student: Student,
    target: Decoder,
    vocabulary: Tensor | None,
    conversations: Iterable[tuple[Tensor, Tensor]],
) -> StudentAcceptance:
    """Measures a student.

    Args:
        student: a replica in the target's dtype.
        target: the target.
        vocabulary: (Vd,) int64 target ids of the draft ids, or None for all.
        conversations: (tokens, mask) pairs.
    """
    depths, read_out = student.depths, student.read_out
    if isinstance(student, SmallModelStudent):  # drafts in turn, and all tokens whatever its loss was over
        depths, read_out, vocabulary = _SMALL_MODEL_DEPTHS, target.lm_head.weight, None
    reached, accepted = torch.zeros(depths), torch.zeros(depths)
    right, rows = torch.zeros(depths, RANKS), torch.zeros(depths)
    for tokens, mask in conversations:
        if len(tokens) < 3:
            continue
        final = compute_features(target, tokens, ("final",))
        truth = target.project(final).argmax(-1)
        own = torch.zeros_like(mask)  # entry u: the token at u is what the target says
        own[1:] = truth[:-1] == tokens[1:]
        ranks = _ranks(student, lesson([(tokens, mask, final)]), read_out, vocabulary, truth, depths)
        alive = torch.ones(len(tokens), dtype=torch.bool)
        for depth in range(depths):
            ahead = student.first + depth
            valid = counted(mask, ahead)
            if ahead > 1:
                valid &= counted(own, ahead - 1)
            hits = valid & (ranks[depth] == 0)
            rows[depth] += valid.sum()
            right[depth] += torch.bincount(ranks[depth][valid].clamp(max=RANKS), minlength=RANKS + 1)[:RANKS]
            alive &= valid
            reached[depth] += alive.sum()
            alive &= hits
            accepted[depth] += alive.sum()
    alphas = accepted / reached.clamp(min=1)
    return StudentAcceptance(
        alphas=alphas.tolist(),
        tau=1 + float(alphas.cumprod(0).sum()),
        accuracies=(right / rows.clamp(min=1)[:, None]).tolist(),
        rows=int(reached[0]),
    )


def _ranks(
    student: Student, given: Lesson, read_out: Tensor, vocabulary: Tensor | None, truth: Tensor, depths: int
) -> Tensor:
    """(depths, n) int64: the rank that the target's token has among each position's candidates."""
    count, size = len(truth), len(read_out)
    ids = torch.arange(size) if vocabulary is None else vocabulary
    draft_id = torch.full((int(max(int(ids.max()), int(truth.max()))) + 1,), -1)
    draft_id[ids] = torch.arange(size)
    result = torch.full((depths, count), RANKS)
    streams = student.streams(given)
    for depth, stream in enumerate(streams):
        ahead = student.first - 1 + depth
        wanted = draft_id[truth[ahead:]]
        for start in range(0, len(wanted), 256):
            part = wanted[start : start + 256]
            logits = (stream[start : start + len(part)] @ read_out.t()).float()
            score = logits.gather(1, part.clamp(min=0)[:, None])
            rank = (logits > score).sum(1)
            result[depth, start : start + len(part)] = torch.where(part < 0, RANKS, rank)
    for depth in range(len(streams), depths):  # a small model: its next drafts are its next positions'
        result[depth, : count - depth] = result[0, depth:]
    return result
