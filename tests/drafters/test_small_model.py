"""A small model as drafter: equal to plain decoding; its cache holds what plain feeding puts there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aquiline import decode
from aquiline.cache import truncate
from aquiline.drafters.small_model import SmallModel
from aquiline.drafters.trees import Chain
from aquiline.sampling import SamplingParams
from aquiline.stats import GenerationStats
from aquiline.targets.target import TargetInput
from tests import tiny
from tests.drafters.loop import Validating, assert_equal_to_plain, noisy, run, tiny_target

SAMPLING = SamplingParams(temperature=1.3, top_k=20, repetition_penalty=1.1, seed=5)


@pytest.fixture(scope="module")
def target():
    return tiny.decoder("llama")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("params", [SamplingParams(), SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("min_prob", [0.0, 0.3])
def test_equals_plain(target, rows, params, min_prob):
    drafter = Validating(SmallModel(noisy(target, 0.02), target, Chain(3, min_prob)))
    assert_equal_to_plain(target, drafter, tiny.prompts(rows, seed=rows), params)


def test_the_target_itself_is_always_right(target):
    drafter = SmallModel(target, target, Chain(3))
    prompts = tiny.prompts(2)
    _, stats = run(target, drafter, prompts, [33, 33])
    assert stats.mean_accept_length == 4  # depth + 1


def test_its_cache_equals_feeding_the_text(target):
    """After acceptances, refusals and steps without drafts, keys are those of the committed text."""
    small = noisy(target, 0.02)
    drafter = SmallModel(small, target, Chain(3))
    state = decode.new_state(target, drafter, 2, 64)
    for row, prompt in enumerate(tiny.prompts(2, seed=4)):
        occupant = decode.Occupant(list(prompt), tiny.chooser(prompt), GenerationStats())
        list(decode.prefill(target, drafter, state, row, occupant))
    for number in range(9):
        decode.step(target, drafter, state, [0, 1] if number % 3 else [1], max_depth=0 if number == 4 else None)
    for row in (0, 1):
        text = state.occupants[row].tokens
        drafter.reset(row, len(text) - 1, state.drafter_state)  # drops drafts that were not verified
        length = int(state.drafter_state.cache.lengths[row])
        assert len(text) - 5 <= length < len(text)
        cache = small.new_cache(1, 64)
        small.forward(TargetInput(torch.tensor([text[:length]]), torch.arange(length)[None], None, cache, [0]))
        kept = state.drafter_state.cache.key_block[:, row, :, :length]
        torch.testing.assert_close(kept, cache.key_block[:, 0, :, :length])


def test_resumes_after_a_reset_to_an_earlier_turn(target):
    """A chat that is cut back and continued differently equals a fresh one."""
    drafter = SmallModel(noisy(target, 0.02), target, Chain(3))
    prompt, other = [5, 6, 7, 8], [5, 6, 9]
    state = decode.new_state(target, drafter, 1, 64)
    list(decode.prefill(target, drafter, state, 0, decode.Occupant(prompt, tiny.chooser(prompt), GenerationStats())))
    decode.step(target, drafter, state, [0])
    truncate(state.cache, 0, 2)
    drafter.reset(0, 2, state.drafter_state)
    request = decode.Occupant(other, tiny.chooser(other), GenerationStats())
    list(decode.prefill(target, drafter, state, 0, request))
    out = request.tokens[-1:]
    while len(out) < 12:
        out += decode.step(target, drafter, state, [0])[0].tokens
    assert out[:12] == run(target, None, [other], [12])[0][0]


def test_stops_drafting_at_the_end_of_its_own_context(target):
    small = noisy(target, 0.02)
    small.shape = replace(small.shape, max_positions=20)
    prompts = [tiny.prompts(1)[0][:10]]
    found, stats = run(target, SmallModel(small, target, Chain(3)), prompts, [30])
    assert found == run(target, None, prompts, [30])[0]
    assert 0 < stats.nodes < 30


def test_refuses_another_vocabulary(target):
    with pytest.raises(ValueError, match=r"5 tokens.*97.*distil"):
        SmallModel(tiny_target(5), target)


def short(target, positions):
    """The target as a small model with a shorter context."""
    copy = noisy(target, 0.0)
    copy.shape = replace(copy.shape, max_positions=positions)
    copy.config = replace(copy.config, max_positions=positions)
    return copy


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_row_beyond_the_small_models_context_stops_its_own_drafts_alone(target, params, sampled):
    long, brief = [5 + i % 40 for i in range(80)], [7, 8, 9]
    # 50 positions: one row is past them, one reaches them, one stays far away.
    drafter = Validating(SmallModel(short(target, 64), target, Chain(3), sampled=sampled))
    _, alone = run(target, drafter, [brief], [24], params)
    prompts = [long, brief, [5 + i % 40 for i in range(55)]]
    texts, stats = run(target, drafter, prompts, [24, 24, 24], params)
    assert stats.accepted > alone.accepted > 0
    if not sampled or params.temperature == 0:
        assert texts == run(target, None, prompts, [24, 24, 24], params)[0]


@pytest.mark.parametrize("size", [tiny.VOCAB - 3, tiny.VOCAB + 3])
def test_a_vocabulary_of_another_size_is_padded(target, size):
    """A model with fewer tokens never drafts the others, and reads over them; one with more drafts none of its own."""
    small = noisy(target, 0.0)
    weight = small.embed_tokens.weight.data
    extra = torch.randn(max(size - tiny.VOCAB, 0), weight.shape[1], dtype=weight.dtype)
    head = torch.cat((small.lm_head.weight.data, extra * 9))[:size]
    small.embed_tokens = torch.nn.Embedding.from_pretrained(torch.cat((weight, extra))[:size])
    small.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
    small.shape = replace(small.shape, vocab_size=size)
    drafter = Validating(SmallModel(small, target, Chain(3)))
    prompts = [[*prompt, tiny.VOCAB - 1] for prompt in tiny.prompts(2, seed=2)]
    for params in (SamplingParams(), SAMPLING):
        texts, stats = run(target, drafter, prompts, [40, 40], params)
        assert texts == run(target, None, prompts, [40, 40], params)[0]
        assert stats.accepted > 0
