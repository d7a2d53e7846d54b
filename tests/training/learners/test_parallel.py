"""Medusa and Hydra heads: where they start."""

from __future__ import annotations

import pytest
import torch

from aquiline.training.features import compute_features
from aquiline.training.learners.learner import Example
from aquiline.training.learners.parallel import head_modules, new_parallel
from aquiline.training.settings import PARALLEL, TrainSettings
from tests import tiny


@pytest.mark.parametrize("kind", PARALLEL)
def test_heads_start_as_the_regression_of_the_feature_ahead(kind: str) -> None:
    """Against NumPy's least squares over a double loop; it predicts far better than the identity."""
    target = tiny.decoder("llama", torch.float32)
    settings = TrainSettings("", ("",), "", kind, num_heads=2)
    learner = new_parallel(settings, target, target.lm_head.weight, None, "")
    examples = []
    for prompt in tiny.prompts(40, seed=6):
        ids = torch.tensor(prompt)
        final = compute_features(target, ids, ("final",))
        examples.append(Example(ids, torch.arange(len(ids)) >= 1, final, final))
    before = learner.loss(learner.batch(examples), [1.0, 1.0])[0].item()
    learner.fit(iter(examples))
    reads, wanted = [], []
    for example in examples:
        for t in range(len(example.tokens) - 3):
            if bool(example.mask[t + 1 : t + 4].all()):
                path = [target.embed(example.tokens[t + 1 : t + 3])] if kind == "hydra" else []
                reads.append(learner.network.read(1, example.final[t], *path))
                wanted.append(example.final[t + 2])
    inputs = torch.cat((torch.stack(reads), torch.ones(len(reads), 1)), dim=1).double()
    ridge = 1e-3 * inputs.square().sum(0).mean() * torch.eye(inputs.shape[1])
    rows = torch.cat((inputs, ridge.sqrt()))
    aims = torch.cat((torch.stack(wanted).double(), torch.zeros(inputs.shape[1], 48)))
    expected = torch.linalg.lstsq(rows, aims).solution
    linear = head_modules(learner.network)[1].linear
    torch.testing.assert_close(linear.weight.double(), expected[:-1].t(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(linear.bias.double(), expected[-1], rtol=1e-3, atol=1e-3)
    after = learner.loss(learner.batch(examples), [1.0, 1.0])[0].item()
    assert after < 0.8 * before
