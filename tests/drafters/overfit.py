"""Medusa and Hydra heads and a small model that know a few texts of a tiny target by heart."""

from __future__ import annotations

from functools import cache

import torch

from aquiline.drafters.parallel import ParallelHeads
from aquiline.training.features import compute_features
from aquiline.training.learners.learner import Example
from aquiline.training.learners.parallel import ParallelLearner, new_parallel
from aquiline.training.learners.small import SmallLearner, new_small
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
def student(
    kind: str, steps: int = 50, *, own_lm_head: bool = False, drafted: int = tiny.VOCAB
) -> ParallelLearner | SmallLearner:
    """A learner trained in float64 on `texts`, by the package's own loss."""
    target = tiny.decoder("llama")
    head = target.lm_head.weight[:drafted]
    if kind == "small-model":
        settings = TrainSettings("", ("",), "", kind, seed=1, num_layers=4)
        result: ParallelLearner | SmallLearner = new_small(settings, target, head, "").replica()
    else:
        settings = TrainSettings("", ("",), "", kind, seed=1, num_heads=3, num_blocks=2, own_lm_head=own_lm_head)
        vocabulary = None if drafted == tiny.VOCAB else torch.arange(drafted)
        result = new_parallel(settings, target, head, vocabulary, "").replica()
    examples = []
    for prompt, answer in texts():
        tokens = torch.tensor(prompt + answer)
        final = compute_features(target, tokens, ("final",))
        examples.append(Example(tokens, torch.arange(len(tokens)) >= len(prompt), final, final))
    batch = result.batch(examples)
    optimiser = torch.optim.Adam(result.network.parameters(), lr=0.01)
    for _ in range(steps):
        optimiser.zero_grad()
        loss, _, _ = result.loss(batch, [0.01] * result.depths)
        loss.backward()
        optimiser.step()
    result.network.eval().requires_grad_(False)
    return result


def heads(kind: str, **settings: object) -> ParallelHeads:
    """Overfit Medusa or Hydra heads."""
    made = student(kind, **settings)
    drafted = settings.get("drafted", tiny.VOCAB)
    return ParallelHeads(made.network, None if drafted == tiny.VOCAB else torch.arange(drafted))
