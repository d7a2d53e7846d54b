"""Stores of text find what followed a context, prefer long matches and frequent continuations, and stay small."""

from __future__ import annotations

import random

import pytest

from aquiline.drafters.drafter import Committed, Rows
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.mixed import LookupFirst
from aquiline.drafters.store import BELIEFS, BREAK, LONGEST, OTHER_BELIEFS, Prediction, Store
from aquiline.sampling import SamplingParams, TokenChooser
from aquiline.tree import from_lists, node_sources, to_lists
from tests.drafters.loop import extend, rows_of
from tests.drafters.test_mixed import Fixed


def store_of(*tokens: int, orders: tuple[int, ...] = (1, 2, 4), limit: int | None = None) -> Store:
    store = Store(orders, limit)
    store.extend(tokens)
    return store


def latest_longest(text: list[int], context: list[int], orders: tuple[int, ...]) -> tuple[int, int]:
    """(length, end) of the longest match among the latest 8 ends of the longest n-gram; the slow twin."""
    for order in reversed(orders):
        ends = [end for end in range(order, len(text)) if text[end - order : end] == context[-order:]][-8:]
        lengths = [
            next((n for n in range(min(LONGEST, end, len(context)), 0, -1) if text[end - n : end] == context[-n:]), 0)
            for end in ends
        ]
        if ends and len(context) >= order:
            return max(zip(lengths, ends, strict=True))
    return 0, 0


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_of_the_latest_matches_is_found(seed: int) -> None:
    chance = random.Random(seed)
    text = [chance.randrange(4) for _ in range(3000)]
    store = Store((2, 4, 8))
    for start in range(0, 3000, 100):
        store.extend(text[start : start + 100])
        context = [chance.randrange(4) for _ in range(LONGEST)] if start % 200 else text[start + 90 : start + 100]
        length, end = latest_longest(text[: start + 100], context, (2, 4, 8))
        found = store.find(context, 1, 0.0)
        assert found.match == length
        if length > 8:
            # Only the occurrences that match half as far vote, so the token followed one of them.
            assert found.tokens[0] in text[: start + 100]
    assert end > 0


def test_chances_multiply_along_a_match_and_end_the_draft() -> None:
    found = store_of(1, 2, 3, 4, 5, 6).find([9, 1, 2], 9, 0.3)
    expected = [BELIEFS[2], BELIEFS[2] * BELIEFS[3], BELIEFS[2] * BELIEFS[3] * BELIEFS[4]]
    assert list(found.tokens) == [3, 4, 5] and found.chances == pytest.approx(expected) and found.match == 2


def test_the_frequent_continuation_wins_and_the_latest_of_equals() -> None:
    frequent = store_of(1, 2, 3, 1, 2, 3, 1, 2, 4, 9).find([1, 2], 1, 0.0)
    assert list(frequent.tokens) == [3] and frequent.chances == pytest.approx([(1 + BELIEFS[2]) / 3])
    assert list(store_of(1, 2, 3, 1, 2, 4, 9).find([1, 2], 1, 0.0).tokens) == [4]


def test_a_long_match_outweighs_frequency() -> None:
    store = store_of(5, 6, 7, 1, 2, 8, *[3, 1, 2, 9] * 3)
    assert list(store.find([5, 6, 7, 1, 2], 1, 0.0).tokens) == [8]


def test_nothing_crosses_a_break_or_continues_the_end() -> None:
    store = store_of(1, 2, BREAK, 3, 4)
    assert not store.find([1, 2], 3, 0.0).tokens and not store.find([9, 3, 4], 3, 0.0).tokens
    assert list(store.find([3], 3, 0.0).tokens) == [4]
    assert store.find([7, 7], 3, 0.0).match == 0


def test_the_oldest_tokens_are_dropped_and_the_rest_is_still_found() -> None:
    store = Store((2,), limit=100)
    for start in range(0, 1000, 10):
        store.extend(range(start, start + 10))
        assert len(store.tokens) <= 100
    assert list(store.find([995, 996], 3, 0.0).tokens) == [997, 998, 999]
    assert not store.find([3, 4], 3, 0.0).tokens


def test_branches_are_the_latest_continuations() -> None:
    store = store_of(1, 2, 3, 1, 2, 4, 1, 2, 5, 9)
    assert store.branches([1, 2], 2, 2) == [[5, 9], [4, 1]]


def test_a_prediction_changed_in_places_is_mostly_drafted() -> None:
    """An output of 400 tokens that changes every 50th token of the expected text."""
    chance = random.Random(1)
    expected = [chance.randrange(60) for _ in range(400)]
    output = [99 if i % 50 == 49 else token for i, token in enumerate(expected)]
    prediction, done, steps = Prediction(expected), 0, 0
    while done < len(output):
        drafts = prediction.continuation(output[:done], 16)
        right = next((i for i, token in enumerate(drafts) if output[done + i : done + i + 1] != [token]), len(drafts))
        done, steps = done + right + 1, steps + 1
    assert steps < 400 / 6


def lookup_rows(text: list[int], slot: int, prompt_length: int) -> Rows:
    return Rows([slot], [text], [TokenChooser(SamplingParams(), 0, prompt_length)])


def test_the_likelier_of_two_texts_continues_the_context() -> None:
    """A longer match in another text loses to a shorter one in the text itself, unless it is much longer."""
    shared = Store(beliefs=OTHER_BELIEFS)
    shared.extend([70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 90])
    drafter, tail = PromptLookup(shared=shared), [70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81]
    for length, own, source in (
        (3, 2, "lookup"),
        (8, 4, "lookup"),
        (12, 4, "lookup"),
        (12, 2, "shared"),
        (4, 0, "shared"),
    ):
        state = drafter.new_state(1, 64)
        ending = tail[len(tail) - own :]
        text = [1, 2, 3, *ending, 50, 4, 5, 6, *tail[len(tail) - length :]]
        extend(drafter, state, 0, [0, *text])
        found, named = drafter.find(0, text[-16:], 1, state, 0.0)
        assert (named, list(found.tokens)) == (source, [90 if source == "shared" else 50]), (length, own)


def test_earlier_outputs_are_shared_but_not_prompts() -> None:
    shared = Store((2, 4, 8), 1000)
    drafter = PromptLookup(shared=shared)
    state = drafter.new_state(2, 8)
    first = [1, 2, 3, 50, 51, 52, 53, 54]
    drafter.extend(Committed(lookup_rows(first, 0, 3), None, [8]), state)
    assert len(shared.tokens) == 0, "a short output is shared when its slot is reused"
    drafter.reset(0, 0, state)
    second = [8, 50, 51]
    drafter.extend(Committed(lookup_rows(second, 1, 2), None, [3]), state)
    tree = drafter.propose(lookup_rows(second, 1, 2), state)
    assert to_lists(tree)[0][0] == [51, 52, 53, 54] and node_sources(tree, "?")[0][1] == "shared"
    long = [7, 7, *range(100, 180)]
    drafter.extend(Committed(lookup_rows(long, 0, 2), None, [82]), state)
    assert list(shared.find([150, 151], 2, 0.0).tokens) == [152, 153], "a long one before that"
    drafter.reset(0, 0, state)
    assert shared.tokens.count(150) == 1


def test_the_texts_continuation_follows_the_heads_drafts() -> None:
    head = from_lists([([9, 1, 2, 3], [-1, 0, 0, 2])], log_probs=[[0.0, -2.0, -0.1, -0.3]])
    other = Fixed(([9], [-1]))
    other.tree = head
    drafter = LookupFirst(PromptLookup(depth=3), other)
    state = drafter.new_state(1, 8)
    text = [2, 3, 4, 5, 6, 7, 9]
    drafter.lookup.extend(Committed(rows_of(text), None, [7]), state[0])
    tree = drafter.propose(rows_of(text), state)
    assert to_lists(tree) == [([9, 1, 2, 3, 4, 5, 6], [-1, 0, 0, 2, 3, 4, 5])]
    assert node_sources(tree, "?") == [["head"] * 4 + ["lookup"] * 3]
    assert drafter.propose(rows_of(text, max_depth=2), state).size == 4, "no room"
    other.tree = from_lists([([9, 2, 3], [-1, 0, 1])], log_probs=[[0.0, -1.0, -2.4]])
    assert drafter.propose(rows_of(text), state).size == 3, "too unlikely to pay"
