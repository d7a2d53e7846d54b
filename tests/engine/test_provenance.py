"""Pieces of text with their origin: they join to the text, and cover every token once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from aquiline.drafters.drafter import Committed, Drafting, Rows
from aquiline.drafters.lookahead import Lookahead
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.mixed import LookupFirst, Merged
from aquiline.drafters.requested import PREDICTION_DEPTH, propose_as_asked
from aquiline.drafters.store import Prediction
from aquiline.engine.emission import Emission
from aquiline.engine.request import Engine, Piece, Request, StreamEvent, check
from aquiline.sampling import SamplingParams
from aquiline.tree import from_lists, node_sources, to_lists
from tests import tiny
from tests.drafters.test_mixed import Fixed
from tests.path_target import PathTarget
from tests.tiny_tokenizers import byte_fallback, byte_level, every_byte
from tests.tree_invariants import validate

TOKENIZERS = {"byte_level": byte_level, "every_byte": every_byte, "byte_fallback": byte_fallback}


def taken(emission: Emission, tokens: list[int], sources: Sequence[str] = ()) -> StreamEvent:
    count = next((i for i, token in enumerate(tokens, 1) if emission.add(token)), len(tokens))
    return emission.take(None, sources[:count])


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_text_and_name_every_token(name: str, data: st.DataObject) -> None:
    tokenizer: Any = TOKENIZERS[name]()
    vocabulary = len(tokenizer)
    engine = Engine(PathTarget(vocabulary), None, tokenizer, (0,))
    tokens = data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=16))
    stops = data.draw(st.lists(st.sampled_from(["a", "ab", "ba", "é", ". ", "abc"]), max_size=2))
    params = SamplingParams(max_new_tokens=data.draw(st.integers(1, 16)), stop=tuple(stops))
    plain, told = (Emission(engine, Request([5], params, Drafting(), p), 0, 0, 1) for p in (False, True))
    pieces, text, place = list[Piece](), "", 0
    while place < len(tokens) and told.finish_reason is None:
        width = data.draw(st.integers(1, 5))
        block = tokens[place : place + width]
        sources = [f"{place + i}" for i in range(len(block))]
        event, same = taken(told, block, sources), taken(plain, block)
        assert (event.text, event.finish_reason) == (same.text, same.finish_reason) and same.pieces is None
        assert "".join(piece.text for piece in event.pieces or []) == event.text
        pieces, text, place = [*pieces, *(event.pieces or [])], text + event.text, place + width
    named = [(token, piece.source) for piece in pieces for token in piece.token_ids]
    assert named == [(token, f"{i}") for i, token in enumerate(tokens[: len(named)])]
    if told.finish_reason is not None:
        assert len(named) == told.occupant.stats.emitted


# -- what drafted each node ----------------------------------------------------------------------


def rows(texts: list[list[int]], drafting: list[Drafting], depth: int | None = None) -> Rows:
    return Rows(range(len(texts)), texts, [tiny.chooser(text[:2]) for text in texts], depth, drafting=drafting)


def test_mixed_drafters_name_the_source_of_each_node() -> None:
    texts = [[1, 2, 3, 1, 2], [7, 8, 9, 9, 4]]
    found = PromptLookup(depth=2)
    mine, other = ([2, 5, 6], [-1, 0, 1]), ([4, 5, 6], [-1, 0, 0])
    for drafter in (LookupFirst(found, Fixed(other)), Merged(Fixed(mine, other), found)):
        state = drafter.new_state(2, 64)
        drafter.extend(Committed(rows(texts, []), None, [4, 4]), state)
        tree = drafter.propose(rows(texts, []), state)
        validate(tree)
        sources = [names[1:] for names in node_sources(tree, "?")]
        first = ["lookup"] * 2 if isinstance(drafter, LookupFirst) else ["head", "head", "lookup", "lookup"]
        assert sources == [first, ["head", "head"]]


# -- what a request asks for ---------------------------------------------------------------------


def test_each_row_drafts_as_its_request_asks() -> None:
    branching = ([4, 5, 6, 7, 8], [-1, 0, 0, 1, 3])
    texts = [[9, 3, 4], [9, 3, 4], [9, 3, 4], [9, 3, 4], [9, 3, 4]]
    wishes = [
        Drafting(),
        Drafting(enabled=False),
        Drafting(depth=1),
        Drafting(nodes=3),
        Drafting(expected=Prediction([4, 10, 11, 12])),
    ]
    drafter = Fixed(*[branching] * 3)
    tree = propose_as_asked(drafter, rows(texts, wishes), drafter.new_state(5, 8))
    validate(tree)
    assert to_lists(tree) == [
        branching,
        ([4], [-1]),
        ([4, 5, 6], [-1, 0, 0]),
        ([4, 5, 6, 7], [-1, 0, 0, 1]),
        ([4, 10, 11, 12], [-1, 0, 1, 2]),
    ]
    assert [names[-1] for names in node_sources(tree, "?")] == ["head", "prediction", "head", "head", "prediction"]
    assert to_lists(propose_as_asked(None, rows(texts[:2], wishes[3:]), None))[1][0] == [4, 10, 11, 12]
    assert to_lists(propose_as_asked(None, rows(texts[:2], []), None)) == [([4], [-1])] * 2


def test_a_prediction_is_followed_in_order_and_found_again_after_a_change() -> None:
    prediction = Prediction([1, 2, 3, 4, 5, 6, 1, 2, 7, 8])
    assert prediction.continuation([], 3) == [1, 2, 3] and prediction.continuation([1], 2) == [2, 3]
    assert prediction.continuation([5], 2) == [], "an answer that begins differently"
    assert prediction.continuation([1, 2], 2) == [3, 4]
    assert prediction.continuation([1, 2, 9, 4, 5], 2) == [6, 1], "found again by two tokens"
    assert prediction.continuation([9, 5, 6, 1, 2], 4) == [7, 8], "the later of two occurrences"
    assert prediction.continuation([7, 8], 4) == [] and prediction.proposed == 3 + 2 + 2 + 2 + 2
    assert len(Prediction(list(range(99))).continuation([], PREDICTION_DEPTH)) == PREDICTION_DEPTH


def test_wishes_that_the_drafter_cannot_follow_are_refused() -> None:
    engine = Engine(PathTarget(50), Lookahead(), None, (0,))
    with pytest.raises(ValueError, match=r"Lookahead.*drop"):
        check(engine, Request([1], drafting=Drafting(enabled=False)))
    with pytest.raises(ValueError, match=r"depth is 0.*≥ 1"):
        check(Engine(PathTarget(50), None, None, ()), Request([1], drafting=Drafting(depth=0)))
    assert from_lists([([1], [-1])]).sources is None
