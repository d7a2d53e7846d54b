"""Lookahead: equal to plain decoding; the window is the target's Jacobi iteration, never accepted."""

from __future__ import annotations

import pytest
import torch

from aquiline import decode
from aquiline import tree as trees
from aquiline.drafters.lookahead import Lookahead
from aquiline.sampling import SamplingParams
from aquiline.stats import GenerationStats
from aquiline.verify import LossyRule
from tests import tiny
from tests.drafters.loop import Validating, assert_equal_to_plain, run, tiny_target


@pytest.fixture(scope="module")
def target():
    """Eight tokens only: n-grams come back often enough to be accepted."""
    return tiny_target(8, scale=0.2, layers=4)


PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [7, 0, 3]]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.7, presence_penalty=0.1)], ids=["greedy", "sampling"]
)
@pytest.mark.parametrize("settings", [(4, 3, 4, False), (3, 2, 1, True)], ids=str)
def test_equals_plain(target, rows, params, settings):
    *sizes, from_text = settings
    drafter = Validating(Lookahead(*sizes, from_text=from_text))
    stats = assert_equal_to_plain(target, drafter, PROMPTS[:rows], params, budget=60)
    assert len(stats.offered_at) <= sizes[1] - 1, "a node of the window counted as offered"


def test_equals_plain_with_a_sliding_window_and_distinct_positions():
    target = tiny.decoder("mistral")
    prompts = tiny.prompts(2)
    found, _ = run(target, Validating(Lookahead(4, 4, 3, from_text=True)), prompts, [40, 33])
    assert found == run(target, None, prompts, [40, 33])[0]


def test_the_window_is_a_chain_with_columns_below_it():
    drafter = Lookahead(window=3, ngram=4, guesses=2)
    state = drafter.new_state(2, 8)
    drafter._remember(state[1], 6, [7, 8, 9])
    drafter._remember(state[1], 6, [7, 5, 5])
    tree = drafter.propose(torch.tensor([6, 6]), [[1, 6], [2, 6]], [0, 1], state, 2)
    trees.validate(tree)
    assert tree.num_candidates.tolist() == [1, 4]
    assert tree.tokens[1, :4].tolist() == [6, 7, 5, 8]  # the youngest first, cut to depth 2
    assert tree.num_nodes.tolist() == [1 + 9, 4 + 9]
    assert trees.depths(tree.parents)[0].tolist()[:10] == [0, 1, 2, 3, 2, 3, 4, 3, 4, 5]
    assert tree.parents[0].tolist()[:10] == [-1, 0, 1, 2, 1, 2, 3, 4, 5, 6]


def test_new_ngrams_are_the_targets_own_words(target):
    """Each pooled n-gram's last token is the arg-max after root, level 0 and its own column."""
    drafter = Lookahead(window=3, ngram=3, guesses=9)
    state = decode.new_state(target, drafter, 1, 64)
    prompt = [1, 2, 3]
    decode.prefill(target, drafter, state, 0, decode.Row(prompt, tiny.chooser(prompt), GenerationStats()))
    checked = 0
    for _ in range(8):
        text = list(state.rows[0].tokens)
        drafter._fill(state.drafter_state[0], text)
        before = [(list(column.tokens), column.made) for column in state.drafter_state[0].columns]
        emitted = decode.step(target, drafter, state, [0])[0].tokens
        for j, (column, made) in enumerate(before):
            path = text + [tokens[0] for tokens, _ in before[: j + 1]] + column[1:]
            cache = target.new_cache(1, 64)
            out = target.forward(torch.tensor([path]), torch.arange(len(path))[None], None, cache, [0])
            new = int(out.logits[0, -1].argmax())
            place = j - (len(emitted) - 1)
            if place >= 0:  # not overtaken
                assert state.drafter_state[0].columns[place].tokens == [*column[1:], new]
            if made >= 1:
                assert (*column[1:], new) in state.drafter_state[0].pool[column[0]]
                checked += 1
    assert checked > 10


def test_the_pool_forgets_the_oldest_and_a_free_slot_everything():
    drafter = Lookahead(2, 3, 2)
    state = drafter.new_state(1, 8)
    for ngram in ([1, 1], [2, 2], [1, 1], [3, 3]):
        drafter._remember(state[0], 5, ngram)
    assert list(state[0].pool[5]) == [(1, 1), (3, 3)]
    drafter.reset(0, 4, state)
    assert 5 in state[0].pool
    drafter.reset(0, 0, state)
    assert not state[0].pool


def test_lossy_rules_do_not_accept_the_window(target):
    """With a threshold that accepts whatever has any probability, only candidates are emitted."""
    rule = LossyRule("threshold", single=1e-12)
    drafter = Lookahead(4, 3, 1)
    state = decode.new_state(target, drafter, 1, 64)
    prompt, params = [1, 2, 3], SamplingParams(temperature=1)
    decode.prefill(target, drafter, state, 0, decode.Row(prompt, tiny.chooser(prompt, params), GenerationStats()))
    assert len(decode.step(target, drafter, state, [0], lossy=rule)[0].tokens) == 1
    assert state.rows[0].stats.lossy


@pytest.mark.parametrize("name", ["window", "ngram", "guesses"])
def test_refuses_sizes(name):
    with pytest.raises(ValueError, match=rf"lookahead: {name} is 0; allowed: ≥"):
        Lookahead(**{name: 0})
