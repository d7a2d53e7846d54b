"""Which conversations come when, and how they are grouped."""

from __future__ import annotations

import numpy as np
import pytest

from aquiline.training.data.dataset import TrainingSet
from aquiline.training.stream import Mixture, micro_batches


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


def test_any_seed_of_32_bits_orders_the_data() -> None:
    first, last = (Mixture(sets(), [1.0, 3.0], 64, seed=seed) for seed in (0, 2**32 - 1))
    assert first.next_batch(100) != last.next_batch(100)


@pytest.mark.parametrize("pack", [False, True])
def test_micro_batches_hold_everything_once_within_the_bound(pack: bool) -> None:
    lengths = [5, 40, 3, 17, 17, 60, 2]
    groups = micro_batches(lengths, 40, pack=pack)
    assert sorted(i for group in groups for i in group) == list(range(7))
    for group in groups:
        sizes = [lengths[i] for i in group]
        occupied = sum(sizes) if pack else max(sizes) * len(sizes)
        assert len(group) == 1 or occupied <= 40
