"""A start for Medusa and Hydra heads: the least-squares regression of the feature ahead.

The head of depth i shall produce a stream that the LM head reads like the target's own feature
at t + i + 1. The best linear map from what the head reads to that feature is the solution of one
linear system, so it needs no steps of gradient descent: it takes seconds and is worth many
thousand positions of training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aquiline.training.learners.students import HeadsStudent, Lesson, head_modules, rows_that_count

_RIDGE = 1e-3  # of the mean of the inputs' second moments


class Regression:
    """Sums moments over lessons, then solves for every head's linear map.

    Args:
        student: heads with float32 masters, whose linear maps are overwritten by `solve`.

    Attributes:
        rows: positions seen at depth 0.
    """

    def __init__(self, student: HeadsStudent) -> None:
        self._student, self.rows = student, 0
        self._moments: list[tuple[Tensor, Tensor] | None] = [None] * student.depths

    @torch.no_grad()
    def add(self, given: Lesson) -> None:
        """Takes in the positions of a lesson that count."""
        rows = rows_that_count(self._student, given)
        self.rows += len(rows[0])
        final = given.final.float()
        for depth, read in enumerate(self._student.reads(_in_float(given))):
            t = rows[depth]
            inputs = torch.cat((read[t], torch.ones(len(t), 1, device=read.device)), dim=1)
            wanted = final[t + self._student.first - 1 + depth]
            squares, products = inputs.t() @ inputs, inputs.t() @ wanted
            known = self._moments[depth]
            self._moments[depth] = (squares, products) if known is None else (known[0] + squares, known[1] + products)

    @torch.no_grad()
    def solve(self) -> None:
        """Writes the maps into the heads; the LM head reads them as it reads the feature."""
        for head, moments in zip(head_modules(self._student.network), self._moments, strict=True):
            if moments is None or not float(moments[0][-1, -1]):
                continue  # no text is that long: the head keeps its start
            squares, products = (part.double() for part in moments)
            ridge = _RIDGE * squares.diagonal().mean() * torch.eye(len(squares), dtype=torch.float64).to(squares)
            solution = torch.linalg.solve(squares + ridge, products)
            head.linear.weight.copy_(solution[:-1].t())
            head.linear.bias.copy_(solution[-1])


def _in_float(given: Lesson) -> Lesson:
    return Lesson(given.tokens, given.mask, given.final.float(), given.lengths)
