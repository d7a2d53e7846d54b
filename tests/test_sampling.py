"""The processed distribution is transformers', the penalties are what they say, and the draw follows the law."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from aquiline.race import draw, uniform
from aquiline.sampling import SamplingParams, TokenChooser, distribution, processed_logits
from tests import tiny

VOCAB = 40


def random_logits(seed: int, *, ties: bool = False) -> Tensor:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits * 2).round() / 2 if ties else logits


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.4, "top_k": 12, "top_p": 0.85, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 3, "top_p": 0.5, "min_p": 0.3},
]


# Which of several equal tokens stays within top_p, transformers leaves to the order of its sort.
@pytest.mark.parametrize(
    ("settings", "ties"),
    [(settings, ties) for settings in FILTERS for ties in (False, True) if not (ties and "top_p" in settings)],
    ids=str,
)
def test_temperature_and_filters_are_those_of_transformers(settings: dict[str, Any], ties: bool) -> None:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(settings["temperature"])])
    warpers += [TopKLogitsWarper(settings["top_k"])] if "top_k" in settings else []
    warpers += [TopPLogitsWarper(settings["top_p"])] if "top_p" in settings else []
    warpers += [MinPLogitsWarper(settings["min_p"])] if "min_p" in settings else []
    dropped = 0
    for seed in range(20):
        logits = random_logits(seed, ties=ties)
        expected = warpers(torch.zeros(1, 1, dtype=torch.int64), logits[None].clone())[0].softmax(-1)
        found = distribution(logits, SamplingParams(**settings))
        torch.testing.assert_close(found, expected)
        dropped += int((found == 0).sum())
    assert (dropped > 0) == (len(settings) > 1), "a filter must have dropped something"


def test_the_repetition_penalty_is_that_of_transformers_and_counts_the_prompt() -> None:
    prefix = [3, 8, 3, 11, 20]
    for seed in range(5):
        logits = random_logits(seed)
        expected = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([prefix]), logits[None].clone())[0]
        found = processed_logits(logits, SamplingParams(repetition_penalty=1.4), prefix, 4)
        torch.testing.assert_close(found, expected)


def test_the_other_penalties_count_the_output_alone() -> None:
    """Prompt 1 2 2, output 2 5 5: presence once for each token, frequency for each time."""
    logits = random_logits(0)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={1: 2.0, 5: -1.0})
    expected = logits.clone()
    expected[2] -= 0.5 + 0.25
    expected[5] -= 0.5 + 2 * 0.25 + 1.0
    expected[1] += 2.0
    torch.testing.assert_close(processed_logits(logits, params, [1, 2, 2, 2, 5, 5], 3), expected)
    assert torch.equal(logits, random_logits(0)), "the logits that were given stay as they are"


@pytest.mark.parametrize(("emitted", "barred"), [(0, True), (2, True), (3, False), (4, False)])
def test_end_tokens_are_barred_below_the_minimum(emitted: int, barred: bool) -> None:
    scores = processed_logits(random_logits(1), SamplingParams(min_new_tokens=3), [9, 9, *[4] * emitted], 2, (6, 7))
    assert [bool(scores[token] == -math.inf) for token in (6, 7, 8)] == [barred, barred, False]


def test_the_draw_follows_the_distribution() -> None:
    """Chi-square over seeds and over positions; false alarm one in a million each (6 degrees of freedom)."""
    probs = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01])
    for pairs in ([(seed, 3) for seed in range(6000)], [(17, position) for position in range(6000)]):
        counts = torch.bincount(torch.tensor([draw(probs, *pair) for pair in pairs]), minlength=7)
        expected = probs * len(pairs)
        assert float(((counts - expected) ** 2 / expected).sum()) < 38.26
    assert draw(probs, 5, 9) == draw(probs, 5, 9) == draw(probs * (1 + 1e-6), 5, 9)


def test_a_position_counts_from_the_end_of_the_prompt() -> None:
    """The same distribution after prompts of different lengths: the same draws."""
    logits, params = random_logits(2), SamplingParams(temperature=2.0)
    for position in range(20):
        tokens = {TokenChooser(params, 4, length)(logits, [1] * length + [2] * position) for length in (1, 2, 7)}
        assert tokens == {draw(distribution(logits, params), 4, position)}


def test_greedy_takes_the_lower_of_two_equal_tokens_and_a_nan_is_refused() -> None:
    chooser = tiny.chooser([1], SamplingParams(presence_penalty=0.1))
    assert chooser(torch.tensor([0.0, 5.0, 5.0, 1.0]), [1]) == 1
    with pytest.raises(ValueError, match="NaN"):
        chooser(torch.tensor([0.0, math.nan, 5.0, 1.0]), [1])


def test_coins_are_uniform_and_repeatable() -> None:
    coins = [uniform(seed, 2) for seed in range(4000)]
    assert coins[:3] == [uniform(seed, 2) for seed in range(3)]
    counts = torch.histc(torch.tensor(coins), 8, 0, 1)
    assert float(((counts - 500) ** 2 / 500).sum()) < 40.52, "chi-square with 7 degrees, one in a million"


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_the_earlier_of_equals() -> None:
    third = pytest.approx(1 / 3)
    for tokens, top_p, kept in ((2, 0.5, [1, 0]), (4, 0.75, [third, third, third, 0]), (4, 0.5, [0.5, 0.5, 0, 0])):
        assert distribution(torch.zeros(tokens), SamplingParams(temperature=1.0, top_p=top_p)).tolist() == kept


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", math.inf),
        ("min_new_tokens", 1.5),
        ("top_k", 1.5),
        ("n", True),
        ("seed", 1.5),
        ("seed", "x"),
        ("seed", True),
        ("logprobs", True),
        ("temperature", "warm"),
        ("temperature", None),
        ("stop", b"a"),
        ("stop", None),
        ("stop", ("a", 1)),
        ("stop_token_ids", (1.5,)),
        ("logit_bias", [1]),
        ("logit_bias", {1.5: 2}),
        ("logit_bias", {1: "x"}),
        ("logits_processors", (5,)),
        ("ignore_eos", "no"),
    ],
)
def test_settings_of_another_type_are_named(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{name} is .*; allowed: "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 1 << 64), ("logit_bias", {1: math.nan}), ("logit_bias", {1: math.inf})]
)
def test_settings_out_of_range_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is .*; allowed: "):
        SamplingParams(**{name: value})


def test_integers_of_other_libraries_are_integers() -> None:
    assert SamplingParams(max_new_tokens=numpy.int32(3)) == SamplingParams(max_new_tokens=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e-300])
@pytest.mark.parametrize("top_p", [1.0, 1e-300])
def test_the_coldest_temperatures_are_greedy(temperature: float, top_p: float) -> None:
    logits = torch.tensor([0.5, -3.0, 80.0, 79.0])
    probs = distribution(logits, SamplingParams(temperature=temperature, top_p=top_p))
    assert probs.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("top_p", [1e-45, 1e-300])
def test_the_smallest_nucleus_is_the_likeliest_token(top_p: float) -> None:
    probs = distribution(torch.tensor([1.0, 3.0, 2.0]), SamplingParams(temperature=1.0, top_p=top_p))
    assert draw(probs, 1, 0) == 1
