"""Coupled drafts agree with the target's draw as often as theory says, and change no output."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from aquiline.drafters.coupled import Coupling, agreement
from aquiline.drafters.drafter import Rows
from aquiline.race import draw
from aquiline.sampling import SamplingParams, TokenChooser, distribution

WARM = SamplingParams(temperature=1.0)


def rows_at(seeds: list[int], params: SamplingParams = WARM, output: int = 0) -> Rows:
    """Rows whose prompt has 3 tokens and whose output has `output` so far."""
    text = [1, 2, 3, *[4] * output]
    return Rows(list(range(len(seeds))), [text] * len(seeds), [TokenChooser(params, seed, 3) for seed in seeds])


def agreement_of(p: Tensor, q: Tensor) -> float:
    """Returns the share of races with the same noise that have the same winner, token by token.

    Token v wins both if E_w ≥ E_v · max(p_w / p_v, q_w / q_v) for every w, which has probability
    1 / Σ_w max(p_w / p_v, q_w / q_v).
    """
    return sum(float(1 / torch.maximum(p / p[v], q / q[v]).sum()) for v in range(len(p)))


@pytest.mark.parametrize("seed", range(30))
def test_the_agreement_law(seed: int) -> None:
    torch.manual_seed(seed)
    p, q = torch.randn(2, 2 + seed % 7).mul(2).double().softmax(-1)
    variation = float((p - q).abs().sum() / 2)
    assert agreement_of(p, q) >= (1 - variation) / (1 + variation) - 1e-12


@pytest.mark.parametrize("reduced", [False, True], ids=["all tokens", "a draft vocabulary"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_agreement_is_that_of_the_definition(reduced: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    target, drafted = torch.randn(2, 40, 12).mul(3).to(dtype)
    drafted[0, :6], target[1, 3:] = -math.inf, -math.inf  # tokens without a chance
    drafted[2] = target[2]
    ids = torch.tensor([0, 2, 3, 5, 6, 8, 11]) if reduced else torch.arange(12)
    gammas = (0.5, 1.0, 1.7)
    found = agreement(drafted[:, ids], target, gammas, ids if reduced else None)
    for shares, gamma in zip(found, gammas, strict=True):
        for share, p, logits in zip(shares.tolist(), target.double().softmax(-1), drafted.double(), strict=True):
            q = torch.zeros(12, dtype=torch.float64).index_put((ids,), (logits[ids] * gamma).softmax(-1))
            assert share == pytest.approx(agreement_of(p.clamp(min=1e-300), q.clamp(min=1e-300)), abs=1e-5)
    if not reduced:
        assert float(found[1, 2]) == pytest.approx(1, abs=1e-5), "a perfect draft always agrees at γ = 1"


@pytest.mark.parametrize("reduced", [False, True], ids=["all tokens", "a draft vocabulary"])
def test_drafts_agree_with_draws_as_often_as_the_law_says(reduced: bool) -> None:
    """8,000 seeds, γ = 1; five standard deviations: false alarm below one in a million."""
    torch.manual_seed(1)
    logits, drafted = torch.randn(2, 6).mul(1.5)
    ids = torch.tensor([0, 2, 3, 5]) if reduced else torch.arange(6)
    p, q = logits.softmax(-1), torch.full((6,), 1e-30).index_put((ids,), drafted[ids].softmax(-1))
    coupling, count = Coupling(ids if reduced else None, gamma=1.0), 8000
    raced = coupling(drafted[ids].expand(count, -1), rows_at(list(range(count)), output=2), 4)
    proposed = ids[raced.argmax(-1)].tolist()
    # The text has 2 output tokens, so children at depth 4 are drafts for output position 5.
    share = sum(token == draw(p, seed, 5) for seed, token in enumerate(proposed)) / count
    expected = agreement_of(p.double(), q.double())
    assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / count)
    greedy = float(p[ids[drafted[ids].argmax()]])
    assert share > greedy + 0.05, "coupling agrees more often than the likeliest token does"


@pytest.mark.parametrize(
    "params",
    [
        WARM,
        SamplingParams(temperature=0.6, top_k=3),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=0.8, min_p=0.2),
        SamplingParams(temperature=1.2, top_k=5, top_p=0.7, min_p=0.05),
        SamplingParams(temperature=1e-30, top_p=0.5),
    ],
)
def test_a_perfect_draft_with_gamma_1_always_agrees(params: SamplingParams) -> None:
    torch.manual_seed(3)
    logits = torch.randn(9) * 2
    raced = Coupling(gamma=1.0)(logits.expand(200, 2, -1), rows_at(list(range(200)), params), 1)
    expected = [draw(distribution(logits, params), seed, 0) for seed in range(200)]
    assert raced.argmax(-1).tolist() == [[token] * 2 for token in expected]


def test_filters_keep_what_sampling_keeps() -> None:
    torch.manual_seed(5)
    logits = torch.randn(20) * 2
    for params in (SamplingParams(temperature=0.9, top_p=0.6), SamplingParams(temperature=2.0, top_k=7, top_p=0.8)):
        raced = Coupling()(logits[None], rows_at([4], params), 1)[0]
        assert torch.equal(raced.isfinite(), distribution(logits, params) > 0)


def test_a_wide_nucleus_bars_nothing() -> None:
    """The draft keeps all tokens if the likeliest 128 do not hold top_p."""
    raced = Coupling()(torch.zeros(1, 400), rows_at([4], SamplingParams(temperature=1.0, top_p=0.9)), 1)
    assert bool(raced.isfinite().all())


def test_greedy_rows_keep_their_logits_beside_sampling_rows() -> None:
    logits = torch.randn(2, 7)
    rows = Rows([0, 1], [[1, 2]] * 2, [TokenChooser(params, 8, 1) for params in (SamplingParams(), WARM)])
    raced = Coupling()(logits, rows, 1)
    assert torch.equal(raced[0], logits[0]) and not torch.equal(raced[1], logits[1])
    assert Coupling()(logits, rows.pick([0, 0]), 1) is logits
