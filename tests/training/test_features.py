"""Features for training equal those of the target."""

from __future__ import annotations

import pytest
import torch

from aquiline.targets.target import TargetInput
from aquiline.training.features import compute_features
from tests.tiny import VOCAB, decoder


@pytest.mark.parametrize("family", ["llama", "mistral", "smollm3"])
def test_features_equal_those_of_the_target(family: str) -> None:
    target = decoder(family)
    tokens = torch.arange(30) % VOCAB
    wanted = (2, 3, 7, "final")
    cache = target.new_cache(1, 30)
    out = target.forward(TargetInput(tokens[None], torch.arange(30)[None], None, cache, [0], wanted))
    assert out.features is not None
    torch.testing.assert_close(compute_features(target, tokens, wanted), out.features[0], rtol=1e-6, atol=1e-6)
