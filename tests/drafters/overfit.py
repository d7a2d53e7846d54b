"""Medusa and Hydra heads and a small model that know a few texts of a tiny target by heart."""

from __future__ import annotations

from functools import cache

import torch

from aquiline.drafters.parallel import ParallelHeads
from aquiline.training.features import compute_features
from aquiline.training.learners.new_students import new_student
from aquiline.training.learners.students import Student, lesson, student_loss
from aquiline.training.settings import TrainSettings
from tests import tiny

LENGTH = 36


@cache
def texts(count: int = 3) -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy answer) pairs of the tiny Llama."""
    from tests.drafters.loop import run

    prompts = tiny.prompts(count, seed=3)
    answers, _ = run(tiny.decoder("llama"), None, prompts, [LENGTH] * count)
    return list(zip(prompts, answers, strict=True))


@cache
def student(kind: str, steps: int = 50, *, own_lm_head: bool = False, drafted: int = tiny.VOCAB) -> Student:
    """A student trained in float64 on `texts`, by the package's own loss."""
    target = tiny.decoder("llama")
    sizes: dict = (
        {"num_layers": 4} if kind == "small-model" else {"num_heads": 3, "num_blocks": 2, "own_lm_head": own_lm_head}
    )
    settings = TrainSettings("", ("",), "", kind, seed=1, **sizes)
    head = target.lm_head.weight[:drafted]
    result = new_student(settings, target, head).replica()
    examples = []
    for prompt, answer in texts():
        tokens = torch.tensor(prompt + answer)
        mask = torch.arange(len(tokens)) >= len(prompt)
        examples.append((tokens, mask, compute_features(target, tokens, ("final",))))
    given = lesson(examples)
    optimiser = torch.optim.Adam(result.network.parameters(), lr=0.01)
    for _ in range(steps):
        optimiser.zero_grad()
        loss, _, _ = student_loss(result, given, head, [0.01] * result.depths, "kl")
        loss.backward()
        optimiser.step()
    result.network.eval().requires_grad_(False)
    return result


def heads(kind: str, **settings: object) -> ParallelHeads:
    """Overfit Medusa or Hydra heads."""
    made = student(kind, **settings)
    drafted = settings.get("drafted", tiny.VOCAB)
    return ParallelHeads(made.network, None if drafted == tiny.VOCAB else torch.arange(drafted))
