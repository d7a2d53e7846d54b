"""Fused losses against their definitions, values and gradients."""

from __future__ import annotations

import pytest
import torch

from aquiline.training.losses import distribution_loss, feature_loss, restricted_probs


@pytest.mark.parametrize("rows", [1, 5, 4500])  # several blocks and chunks
def test_distribution_loss_equals_its_definition(rows: int) -> None:
    torch.manual_seed(rows)
    hidden = torch.randn(rows, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(33, 8, dtype=torch.float64, requires_grad=True)
    probs = torch.softmax(3 * torch.randn(7, 33, dtype=torch.float64), dim=-1)
    index, scale = torch.randint(7, (rows,)), torch.rand(rows, dtype=torch.float64)
    loss, entropies, best = distribution_loss(hidden, weight, probs, index, scale)
    grads = torch.autograd.grad(2 * loss, [hidden, weight])

    logits = hidden @ weight.t()
    expected = -(probs[index] * torch.log_softmax(logits, dim=-1)).sum(-1)
    twins = torch.autograd.grad(2 * (expected * scale).sum(), [hidden, weight])
    torch.testing.assert_close(entropies, expected.detach())
    torch.testing.assert_close(loss, (expected * scale).sum())
    assert torch.equal(best, logits.argmax(-1))
    for mine, twin in zip(grads, twins, strict=True):
        torch.testing.assert_close(mine, twin)


def test_distribution_loss_of_no_rows_is_zero() -> None:
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64)
    loss, _, _ = distribution_loss(hidden, weight, torch.rand(2, 6), nothing, torch.zeros(0))
    grads = torch.autograd.grad(loss, [hidden, weight])
    assert loss.item() == 0 and float(grads[1].abs().sum()) == 0


def test_restricted_probs_renormalise_over_the_draft_vocabulary() -> None:
    torch.manual_seed(0)
    final, head = torch.randn(300, 8), torch.randn(40, 8)
    ids = torch.tensor([1, 5, 7, 30])
    probs, best = restricted_probs(final, head[ids])
    whole = torch.softmax(final @ head.t(), dim=-1)[:, ids]
    torch.testing.assert_close(probs, whole / whole.sum(-1, keepdim=True))
    assert torch.equal(best, whole.argmax(-1))


@pytest.mark.parametrize("rule", ["tv", "lk"])
def test_acceptance_losses_equal_their_definitions(rule: str) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(33, 8, dtype=torch.float64, requires_grad=True)
    probs = torch.softmax(2 * torch.randn(5, 33, dtype=torch.float64), dim=-1)
    index, scale = torch.randint(5, (20,)), torch.rand(20, dtype=torch.float64)
    loss, rows, _ = distribution_loss(hidden, weight, probs, index, scale, rule)
    grads = torch.autograd.grad(loss, [hidden, weight])

    accepted = torch.minimum(probs[index], torch.softmax(hidden @ weight.t(), dim=-1)).sum(-1)
    expected = 1 - accepted if rule == "tv" else -accepted.log()
    twins = torch.autograd.grad((expected * scale).sum(), [hidden, weight])
    torch.testing.assert_close(rows, expected.detach())
    for mine, twin in zip(grads, twins, strict=True):
        torch.testing.assert_close(mine, twin)


def test_a_frozen_lm_head_gets_no_gradient() -> None:
    hidden = torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(9, 8)
    probs = torch.softmax(torch.randn(2, 9), dim=-1)
    index = torch.tensor([0, 1, 1, 0])
    loss, _, _ = distribution_loss(hidden, weight, probs, index, torch.ones(4))
    (mine,) = torch.autograd.grad(loss, [hidden])
    expected = -(probs[index] * torch.log_softmax(hidden @ weight.t(), dim=-1)).sum()
    (twin,) = torch.autograd.grad(expected, [hidden])
    torch.testing.assert_close(mine, twin, rtol=1e-4, atol=1e-5)


def test_feature_loss_is_smooth_l1_over_the_hidden_axis() -> None:
    predicted, wanted = torch.zeros(2, 4), torch.tensor([[0.5, 0.5, 0.5, 0.5], [3.0, 0, 0, 0]])
    loss = feature_loss(predicted, wanted, torch.tensor([1.0, 2.0]))
    assert float(loss) == pytest.approx(0.125 + 2 * (3 - 0.5) / 4)
