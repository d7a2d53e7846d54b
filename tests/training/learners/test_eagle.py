"""Which positions of an EAGLE micro-batch count, and what they should predict."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aquiline.training.learners.eagle import build_micro_batch, counts
from aquiline.training.learners.learner import Example
from aquiline.training.learners.target_parts import draft_vocabulary


def example(mask: list[int]) -> Example:
    size = len(mask)
    return Example(
        tokens=torch.arange(10, 10 + size),
        mask=torch.tensor(mask, dtype=torch.bool),
        features=torch.arange(size).float()[:, None] + 0.5,
        final=torch.arange(size).float()[:, None],
    )


@pytest.mark.parametrize("pack", [False, True])
def test_rows_predict_the_position_before_an_assistant_token(pack: bool) -> None:
    # x0 x1 x2 x3 x4 with x2, x3, x4 the assistant's: u = 1, 2, 3.
    embedding = torch.arange(40).float()[:, None]
    micro = build_micro_batch([example([0, 0, 1, 1, 1]), example([0, 0, 0, 1])], embedding, 2, pack=pack)
    width = micro.positions.shape[1]
    second = 4 if pack else width  # flat row at which the second conversation begins
    assert micro.counted[0].tolist() == [0, 1, 2, second + 1]
    assert micro.counted[1].tolist() == [0, 1, second]
    assert micro.final[micro.wanted[0], 0].tolist() == [1, 2, 3, 2]
    assert micro.final[micro.wanted[1], 0].tolist() == [2, 3, 2]
    assert counts([example([0, 0, 1, 1, 1]).mask, example([0, 0, 0, 1]).mask], 2) == [4, 3]
    tokens = [e.flatten(0, 1)[:, 0] for e in micro.embedded]
    assert tokens[0][:4].tolist() == [11, 12, 13, 14]  # row t holds x[t+1]
    assert tokens[1][:3].tolist() == [12, 13, 14]
    assert micro.positions.flatten()[second : second + 3].tolist() == [0, 1, 2]
    assert micro.features.flatten()[second : second + 3].tolist() == [0.5, 1.5, 2.5]


def test_every_counted_row_predicts_an_assistant_token_of_its_own_conversation() -> None:
    generator = np.random.default_rng(0)
    masks = [(generator.random(n) < 0.5).astype(int).tolist() for n in (3, 9, 17)]
    examples = [example(mask) for mask in masks]
    micro = build_micro_batch(examples, torch.zeros(60, 1), 4)
    width = micro.positions.shape[1]
    assert [len(r) for r in micro.counted] == counts([e.mask for e in examples], 4)
    for step in range(4):
        for row, wanted in zip(micro.counted[step].tolist(), micro.wanted[step].tolist(), strict=True):
            which, t = divmod(row, width)
            assert masks[which][t + 2 + step] == 1
            assert float(micro.final[wanted, 0]) == t + 1 + step


def test_draft_vocabulary_is_the_most_frequent_assistant_tokens() -> None:
    rows = [
        type("Row", (), {"input_ids": np.array([7, 7, 7, 3, 3, 9]), "loss_mask": mask})()
        for mask in [np.array([0, 0, 0, 1, 1, 1], dtype=bool)] * 2
    ]
    assert draft_vocabulary([rows], 2, 20).tolist() == [3, 9]  # type: ignore[list-item]
    assert draft_vocabulary([rows], 4, 20).tolist() == [0, 1, 3, 9]  # type: ignore[list-item]
