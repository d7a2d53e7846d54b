"""Small models: where they start, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from aquiline.targets.decoder import config_from_hf
from aquiline.training.features import compute_features
from aquiline.training.learners.learner import Example
from aquiline.training.learners.small import copied_layers, new_small, small_config, small_model_json
from aquiline.training.settings import TrainSettings
from tests import tiny


def settings(layers: int, length: int) -> TrainSettings:
    return TrainSettings("", ("",), "", "small-model", num_layers=layers, max_length=length)


@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3", "mistral"])
def test_a_small_model_starts_as_the_targets_layers(family: str) -> None:
    """With all layers it is the target itself; its written configuration reads back."""
    target = tiny.decoder(family)
    raw = tiny.hf_model(family).config.to_dict()
    for layers in (3, 4, 7):
        config = small_config(target.config, layers)
        assert config_from_hf(small_model_json(dict(raw), config)) == config
    learner = new_small(settings(7, 12), target, target.lm_head.weight, "")
    ids = torch.tensor([5, 6, 7, 8, 9])
    none = torch.zeros(5, 48, dtype=torch.float64)
    batch = learner.batch([Example(ids, torch.ones(5, dtype=torch.bool), none, none)])
    final = compute_features(target, ids, ("final",))
    torch.testing.assert_close(learner.replica().streams(batch)[0], final, rtol=1e-5, atol=1e-5)


def test_first_and_last_layers_are_copied_and_no_more_than_there_are() -> None:
    assert copied_layers(30, 5) == [0, 1, 2, 28, 29]
    with pytest.raises(ValueError, match=r"num_layers is 8; allowed: ≤ 7, .*; choose fewer"):
        copied_layers(7, 8)


def test_a_window_below_the_texts_is_refused() -> None:
    target = tiny.decoder("mistral")
    with pytest.raises(ValueError, match=r"max_length is 32; allowed: ≤ 12 .*; lower it"):
        new_small(settings(4, 32), target, target.lm_head.weight, "")
