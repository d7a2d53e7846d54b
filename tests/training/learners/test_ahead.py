"""Medusa and Hydra heads and small models: which positions count, the loss, and the measured acceptance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aquiline import decode
from aquiline.drafters.parallel import ParallelDrafter, ParallelHeads
from aquiline.drafters.trees import Chain
from aquiline.stats import GenerationStats
from aquiline.training.features import compute_features
from aquiline.training.learners.ahead import counted, positions_that_count
from aquiline.training.learners.learner import Example
from aquiline.training.learners.parallel import ParallelLearner, new_parallel
from aquiline.training.learners.small import SmallLearner, new_small
from aquiline.training.settings import PARALLEL, SMALL, TrainSettings
from aquiline.training.validation import measure_acceptance
from tests import tiny
from tests.drafters.loop import rows_of
from tests.drafters.overfit import student, texts


def new_learner(kind: str) -> tuple[ParallelLearner | SmallLearner, int]:
    """A replica in float64, and how many tokens ahead its first depth predicts."""
    target = tiny.decoder("llama")
    head = target.lm_head.weight
    if kind in SMALL:
        return new_small(TrainSettings("", ("",), "", kind, max_length=32), target, head, "").replica(), 1
    settings = TrainSettings("", ("",), "", kind, num_heads=3)
    return new_parallel(settings, target, head, None, "").replica(), 2


def test_positions_count_where_the_root_and_all_drafts_are_the_assistants() -> None:
    """Against a loop over positions, with two turns of the assistant."""
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1, 0], dtype=torch.bool)
    for ahead in (1, 2, 3, 4):
        expected = [
            t + ahead < len(mask) and all(bool(mask[t + i]) for i in range(1, ahead + 1)) for t in range(len(mask))
        ]
        assert counted(mask, ahead).tolist() == expected
    assert counted(mask[:2], 5).tolist() == [False, False]


@pytest.mark.parametrize("kind", [*PARALLEL, *SMALL])
def test_the_loss_is_the_cross_entropy_with_the_targets_law_ahead(kind: str) -> None:
    """Against a plain double loop: conversation, position, depth."""
    target = tiny.decoder("llama")
    learner, first = new_learner(kind)
    generator = torch.Generator().manual_seed(1)
    for parameter in learner.network.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    examples = []
    for tokens in tiny.prompts(3, seed=2, longest=9):
        ids = torch.tensor([*tokens, 1, 2, 3])
        final = compute_features(target, ids, ("final",))
        examples.append(Example(ids, torch.arange(len(ids)) >= 2, final, final))
    batch, scales = learner.batch(examples), [0.5, 0.25, 0.125][: learner.depths]
    loss, losses, hits = learner.loss(batch, scales)

    def stream(example: Example, t: int, depth: int) -> Tensor:
        if isinstance(learner, SmallLearner):
            cut = Example(*(part[: t + 1] for part in (example.tokens, example.mask, example.final, example.final)))
            return learner.streams(learner.batch([cut]))[0][-1]
        path = [target.embed(example.tokens[t + 1 : t + 2 + depth])] if kind == "hydra" else []
        return learner.network.stream(depth, example.final[t], *path)

    expected, right = torch.zeros(learner.depths, dtype=torch.float64), torch.zeros(learner.depths)
    for example in examples:
        laws = target.project(example.final).softmax(-1)
        for t in range(len(example.tokens)):
            for depth in range(learner.depths):
                u = t + first - 1 + depth  # the target's law at u is over token u + 1
                if u + 1 >= len(example.tokens) or not bool(example.mask[t + 1 : u + 2].all()):
                    continue
                logits = target.project(stream(example, t, depth))
                expected[depth] -= (laws[u] * logits.log_softmax(-1)).sum()
                right[depth] += int(logits.argmax() == laws[u].argmax())
    expected = expected.detach()
    torch.testing.assert_close(losses.detach().double(), expected, rtol=1e-5, atol=1e-5)
    assert hits.tolist() == right.tolist()
    total = sum(s * float(e) for s, e in zip(scales, expected, strict=True))
    assert float(loss.detach()) == pytest.approx(total, rel=1e-5)
    sizes = [len(t) for t in positions_that_count(batch, first, learner.depths)]
    assert sizes == learner.counts([example.mask for example in examples])


def test_measured_acceptance_is_that_of_the_loop() -> None:
    """On the target's own words, n-α of the validation is n-α of a chain in the engine."""
    target, made = tiny.decoder("llama"), student("hydra", steps=12)
    assert isinstance(made, ParallelLearner)
    conversations = []
    for prompt, answer in texts():
        tokens = torch.tensor(prompt + answer)
        conversations.append((tokens, torch.arange(len(tokens)) >= len(prompt)))
    measured = measure_acceptance(made, conversations)
    reached, right = [0, 0, 0], [0, 0, 0]
    for prompt, answer in texts():  # a chain from every position of the answer
        for start in range(len(answer) - 1):
            drafter = ParallelDrafter(ParallelHeads(made.network), target, Chain(3))
            state = decode.new_state(target, drafter, 1, 80)
            text = prompt + answer[:start]
            list(
                decode.prefill(target, drafter, state, 0, decode.Occupant(text, tiny.chooser(text), GenerationStats()))
            )
            tree = drafter.propose(rows_of(text + answer[start : start + 1]), state.drafter_state)
            for depth in range(3):
                if start + 1 + depth >= len(answer):
                    break
                reached[depth] += 1
                if int(tree.tokens[0, 1 + depth]) != answer[start + 1 + depth]:
                    break
                right[depth] += 1
    assert measured.positions == reached[0]
    assert measured.alphas == pytest.approx([a / b for a, b in zip(right, reached, strict=True)])
    assert 0 < measured.alphas[0] < 1
