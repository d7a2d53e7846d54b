"""Lookahead: equal to plain decoding; the window is the target's Jacobi iteration, never accepted."""

from __future__ import annotations

import pytest
import torch

from aquiline import decode
from aquiline import tree as trees
from aquiline.drafters.drafter import Committed
from aquiline.drafters.lookahead import Lookahead
from aquiline.sampling import LossyRule, SamplingParams
from aquiline.stats import GenerationStats
from aquiline.targets.target import TargetInput
from tests import tiny
from tests.drafters.loop import Validating, assert_equal_to_plain, rows_of, run, tiny_target
from tests.tree_invariants import validate


@pytest.fixture(scope="module")
def target():
    """Eight tokens only: n-grams come back often enough to be accepted."""
    return tiny_target(8, scale=0.2, layers=4)


PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [7, 0, 3]]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.7, presence_penalty=0.1)], ids=["greedy", "sampling"]
)
@pytest.mark.parametrize("sizes", [(4, 3, 4), (3, 2, 1)], ids=str)
def test_equals_plain(target, rows, params, sizes):
    drafter = Validating(Lookahead(*sizes))
    stats = assert_equal_to_plain(target, drafter, PROMPTS[:rows], params, budget=60)
    assert len(stats.offered_at) <= sizes[1] - 1, "a node of the window counted as offered"


def test_equals_plain_with_a_sliding_window_and_distinct_positions():
    target = tiny.decoder("mistral")
    prompts = tiny.prompts(2)
    found, _ = run(target, Validating(Lookahead(4, 4, 3)), prompts, [40, 33])
    assert found == run(target, None, prompts, [40, 33])[0]


def window_of(tree, drafter, row=0):
    """The window's W columns of N - 1 tokens, read off a tree of one row."""
    first, width = int(tree.num_candidates[row]), drafter.window
    levels = [tree.tokens[row, first + level * width :][:width].tolist() for level in range(drafter.ngram - 1)]
    return [list(column) for column in zip(*levels, strict=True)]


def observed(drafter, state, text, made, emitted):
    """One step on the row in slot 0: the target's arg-max at the last level is `made`."""
    tree = drafter.propose(rows_of(text), state)
    logits = torch.zeros(1, tree.size, 10)
    first = int(tree.num_candidates) + (drafter.ngram - 2) * drafter.window
    logits[0, torch.arange(first, first + drafter.window), torch.tensor(made)] = 1
    rows = rows_of([*text, *emitted])
    drafter.extend(Committed(rows, None, [len(emitted)], tree, logits), state)
    return tree


def test_the_window_is_a_chain_with_columns_below_it():
    drafter = Lookahead(window=3, ngram=4, guesses=2)
    tree = drafter.propose(rows_of([1, 6], [2, 6], max_depth=2), drafter.new_state(2, 8))
    validate(tree)
    assert tree.num_candidates.tolist() == [1, 1]
    assert tree.num_nodes.tolist() == [1 + 9, 1 + 9]
    assert trees.depths(tree.parents)[0].tolist() == [0, 1, 2, 3, 2, 3, 4, 3, 4, 5]
    assert tree.parents[0].tolist() == [-1, 0, 1, 2, 1, 2, 3, 4, 5, 6]
    assert set(tree.tokens[0, 1:].tolist()) <= {1, 6}, "guesses come from the text"


def test_the_youngest_ngrams_are_candidates_and_are_cut_to_the_depth():
    """A text of one token: every column is (5, 5), and each n-gram begins with 5."""
    drafter = Lookahead(window=1, ngram=3, guesses=2)
    state, text = drafter.new_state(1, 8), [5, 5]
    for made in (7, 8):  # the columns (5, 5, 7), (5, 7, 8): the first began as a guess and is not pooled
        observed(drafter, state, text, [made], [5])
        text = [*text, 5]
    tree = drafter.propose(rows_of(text), state)
    assert tree.tokens[0, : int(tree.num_candidates)].tolist() == [5, 7, 8]
    observed(drafter, state, text, [9], [5, 5, 5])  # (7, 8, 9); the text then overtakes the window
    tree = drafter.propose(rows_of([*text, 7]), state)
    assert tree.tokens[0, : int(tree.num_candidates)].tolist() == [7, 8, 9]
    tree = drafter.propose(rows_of([*text, 7], max_depth=1), state)
    assert tree.tokens[0, : int(tree.num_candidates)].tolist() == [7, 8]


def test_new_ngrams_are_the_targets_own_words(target):
    """Each n-gram's last token is the arg-max after root, level 0 and its own column."""
    drafter = Validating(Lookahead(window=3, ngram=3, guesses=9))
    state = decode.new_state(target, drafter, 1, 64)
    prompt = [1, 2, 3]
    list(decode.prefill(target, drafter, state, 0, decode.Occupant(prompt, tiny.chooser(prompt), GenerationStats())))
    expected: list[list[int]] = []
    kept = pooled = 0
    for _ in range(16):
        text = list(state.occupants[0].tokens)
        emitted = decode.step(target, drafter, state, [0])[0].tokens
        tree = drafter.seen[-1]
        window = window_of(tree, drafter.inner)
        for column, before in zip(window, expected, strict=False):
            assert column == before
            kept += 1
        expected = []
        for j, column in enumerate(window):
            path = text + [tokens[0] for tokens in window[: j + 1]] + column[1:]
            out = target.forward(
                TargetInput(torch.tensor([path]), torch.arange(len(path))[None], None, target.new_cache(1, 64), [0])
            )
            expected.append([*column[1:], int(out.logits[0, -1].argmax())])
        del expected[: len(emitted) - 1]  # overtaken
        pooled += int(tree.num_candidates) > 1
    assert kept > 20 and pooled > 2


def test_a_chat_keeps_its_pool_and_a_free_slot_forgets_it():
    drafter = Lookahead(window=1, ngram=3, guesses=2)
    state, text = drafter.new_state(1, 8), [5, 5]
    for made in (7, 8):
        observed(drafter, state, text, [made], [5])
        text = [*text, 5]
    for length, candidates in ((2, [5, 7, 8]), (0, [5])):
        drafter.reset(0, length, state)
        tree = drafter.propose(rows_of([5, 5]), state)
        assert tree.tokens[0, : int(tree.num_candidates)].tolist() == candidates


def test_lossy_rules_do_not_accept_the_window(target):
    """With a threshold that accepts whatever has any probability, only candidates are emitted."""
    rule = LossyRule("threshold", single=1e-12)
    drafter = Lookahead(4, 3, 1)
    state = decode.new_state(target, drafter, 1, 64)
    prompt, params = [1, 2, 3], SamplingParams(temperature=1)
    list(
        decode.prefill(
            target, drafter, state, 0, decode.Occupant(prompt, tiny.chooser(prompt, params), GenerationStats())
        )
    )
    assert len(decode.step(target, drafter, state, [0], lossy=rule)[0].tokens) == 1
    assert state.occupants[0].stats.lossy


@pytest.mark.parametrize("name", ["window", "ngram", "guesses"])
def test_refuses_sizes(name):
    with pytest.raises(ValueError, match=rf"{name} is 0; allowed"):
        Lookahead(**{name: 0})
    with pytest.raises(TypeError, match=rf"{name} is 1.5; allowed"):
        Lookahead(**{name: 1.5})
