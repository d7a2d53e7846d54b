"""Which rows count, what they should predict, and which data comes when."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aquiline.training.data.dataset import TrainingSet
from aquiline.training.learners.eagle import Example, build_micro_batch, counts
from aquiline.training.learners.initial import draft_vocabulary
from aquiline.training.optim import orthogonalise, rate_factor
from aquiline.training.stream import Mixture, micro_batches


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
    assert micro.rows[0].tolist() == [0, 1, 2, second + 1]
    assert micro.rows[1].tolist() == [0, 1, second]
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
    assert [len(r) for r in micro.rows] == counts([e.mask for e in examples], 4)
    for step in range(4):
        for row, wanted in zip(micro.rows[step].tolist(), micro.wanted[step].tolist(), strict=True):
            which, t = divmod(row, width)
            assert masks[which][t + 2 + step] == 1
            assert float(micro.final[wanted, 0]) == t + 1 + step


def sets() -> list[TrainingSet]:
    lengths = [np.full(10, 20), np.full(30, 5)]
    return [TrainingSet(None, "train", {}, n, (), ()) for n in lengths]  # type: ignore[arg-type]


def test_a_mixture_keeps_its_shares_and_goes_on_where_it_was() -> None:
    mixture = Mixture(sets(), [1.0, 3.0], 64, seed=1)
    for _ in range(10):
        mixture.next_batch(100)
    assert mixture.drawn[1] / sum(mixture.drawn) == pytest.approx(0.75, abs=0.03)
    state = mixture.state()
    ahead = [mixture.next_batch(100) for _ in range(5)]
    again = Mixture(sets(), [1.0, 3.0], 64, seed=1)
    again.restore(state)
    assert [again.next_batch(100) for _ in range(5)] == ahead


def test_an_epoch_takes_every_conversation_once_and_a_limit_repeats_few() -> None:
    whole = Mixture(sets()[:1], [1.0], 64, seed=0)
    epochs = [sorted(i for _, i in whole.next_batch(200)) for _ in range(2)]
    assert epochs == [list(range(10))] * 2
    few = Mixture(sets()[:1], [1.0], 64, seed=0, limit=[3])
    assert len({i for _, i in few.next_batch(400)}) == 3


@pytest.mark.parametrize("pack", [False, True])
def test_micro_batches_hold_everything_once_within_the_bound(pack: bool) -> None:
    lengths = [5, 40, 3, 17, 17, 60, 2]
    groups = micro_batches(lengths, 40, pack=pack)
    assert sorted(i for group in groups for i in group) == list(range(7))
    for group in groups:
        sizes = [lengths[i] for i in group]
        occupied = sum(sizes) if pack else max(sizes) * len(sizes)
        assert len(group) == 1 or occupied <= 40


def test_draft_vocabulary_is_the_most_frequent_assistant_tokens() -> None:
    rows = [
        type("Row", (), {"input_ids": np.array([7, 7, 7, 3, 3, 9]), "loss_mask": mask})()
        for mask in [np.array([0, 0, 0, 1, 1, 1], dtype=bool)] * 2
    ]
    assert draft_vocabulary([rows], 2, 20).tolist() == [3, 9]  # type: ignore[list-item]
    assert draft_vocabulary([rows], 4, 20).tolist() == [0, 1, 3, 9]  # type: ignore[list-item]


def test_orthogonalise_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((16, 48), (48, 16)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert float(values.min()) > 0.6 and float(values.max()) < 1.3


def test_rate_rises_stays_and_falls() -> None:
    factors = [rate_factor(seen, warmup=10, decay_from=50, decay_to=100, peak=1.0) for seen in (0, 4, 30, 50, 75, 100)]
    assert factors == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.5, 0.0])
    assert rate_factor(75, warmup=0, decay_from=50, decay_to=100, peak=0.4) == pytest.approx(0.2)
