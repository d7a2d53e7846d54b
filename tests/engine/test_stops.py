"""Stop strings and text in pieces, against twins that look at the whole text."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aquiline.engine.emission import Emission
from aquiline.engine.request import Engine, Request, StreamEvent
from aquiline.engine.stops import StopScanner
from aquiline.engine.text import Detokenizer
from aquiline.sampling import SamplingParams
from tests.path_target import PathTarget
from tests.reference.slow_generate import certain_text, completed_at, decode
from tests.tiny_tokenizers import byte_fallback, byte_level, every_byte

TOKENIZERS = {"byte_level": byte_level, "every_byte": every_byte, "byte_fallback": byte_fallback}
PIECES = st.lists(st.text("abc", max_size=4), max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3)


@given(pieces=PIECES, stops=STOPS, disarmed=st.integers(0, 4))
@settings(max_examples=500, deadline=None)
def test_scanner_equals_a_scan_of_the_whole_text(pieces: list[str], stops: list[str], disarmed: int) -> None:
    scanner, whole, shown = StopScanner(stops), "", ""
    for number, piece in enumerate(pieces):
        before, whole = len(whole), whole + piece
        text, stopped = scanner.scan(piece, armed=number >= disarmed)
        shown += text
        start = completed_at(whole, before, stops) if number >= disarmed else None
        assert stopped == (start is not None)
        if start is not None:
            assert shown == whole[:start]
            return
        held = whole[len(shown) :]
        assert whole.startswith(shown)
        assert all(whole[-size:] != stop[:size] for stop in stops for size in range(len(held) + 1, len(stop)))
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops), "held back for nothing"
    assert shown + scanner.flush() == whole


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_pieces_join_to_the_tokenizers_decoding(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]()
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=16))
    released = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    detokenizer, text = Detokenizer(tokenizer), ""
    for count, (token, release) in enumerate(zip(tokens, released, strict=True), 1):
        detokenizer.add(token)
        if release:
            text += detokenizer.release()
            assert text == certain_text(tokenizer, tokens[:count])
    assert text + detokenizer.finish() == decode(tokenizer, tokens)


def test_special_tokens_can_be_kept() -> None:
    tokenizer = every_byte()
    tokens = [1, *tokenizer("a<eos>b")["input_ids"]]
    for skip, text in ((True, "ab"), (False, "<turn>a<eos>b")):
        detokenizer = Detokenizer(tokenizer, skip)
        pieces = []
        for token in tokens:
            detokenizer.add(token)
            pieces.append(detokenizer.release())
        assert "".join(pieces) + detokenizer.finish() == text == tokenizer.decode(tokens, skip_special_tokens=skip)


def test_a_special_token_does_not_end_a_run_of_bytes() -> None:
    """Decoding skips special tokens first, so the bytes on both sides make one character."""
    tokenizer = byte_fallback()
    tokens = tokenizer.convert_tokens_to_ids(["<0xE2>", "<turn>", "<0x82>", "<0xAC>", "a"])
    detokenizer, shown = Detokenizer(tokenizer), []
    for token in tokens:
        detokenizer.add(token)
        shown.append(detokenizer.release())
    assert shown == ["", "", "", "", "€a"]
    assert decode(tokenizer, tokens) == "€a"


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_blocks_do_not_matter(name: str, data: st.DataObject) -> None:
    """However the tokens are cut into steps, the output is the same."""
    tokenizer = TOKENIZERS[name]()
    engine = Engine(PathTarget(len(tokenizer)), None, tokenizer, (0,))
    tokens = data.draw(st.lists(st.integers(0, min(len(tokenizer), 40) - 1), min_size=1, max_size=16))
    stops = data.draw(st.lists(st.sampled_from(["a", "ab", "ba", "é", ". ", "abc", "!?"]), max_size=3))
    request = Request(
        [5], SamplingParams(max_new_tokens=data.draw(st.integers(1, 16)), stop=tuple(stops), min_new_tokens=0)
    )
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=16, max_size=16))
    whole, parts = Emission(engine, request, 0, 0, 1), Emission(engine, request, 0, 0, 1)
    events = []
    for emission, widths in ((whole, [16]), (parts, sizes)):
        rest = list(tokens)
        for width in widths:
            if rest and emission.finish_reason is None:
                events.append((emission, taken(emission, rest[:width])))
                del rest[:width]
    joined = ["".join(event.text for e, event in events if e is emission) for emission in (whole, parts)]
    assert whole.finish_reason == parts.finish_reason
    if whole.finish_reason:
        assert joined[0] == joined[1] == whole.output().text == parts.output().text
        assert whole.output().token_ids == parts.output().token_ids


def emission_of(tokenizer: Any, **settings: Any) -> Emission:
    engine = Engine(PathTarget(len(tokenizer)), None, tokenizer, (0,))
    return Emission(engine, Request([5], SamplingParams(**settings)), 0, 0, 1)


def taken(emission: Emission, tokens: Sequence[int], logits: torch.Tensor | None = None) -> StreamEvent:
    """One step with these tokens, of which the loop commits none after the end."""
    for token in tokens:
        if emission.add(token):
            break
    return emission.take(logits)


def spelled(text: str) -> list[int]:
    tokens: list[int] = every_byte()(text, add_special_tokens=False)["input_ids"]
    return tokens


def test_a_stop_inside_an_accepted_block() -> None:
    emission = emission_of(every_byte(), stop=("END", "xyz"))
    first = taken(emission, spelled("so E"))
    assert (first.text, first.finish_reason) == ("so ", None)
    last = taken(emission, spelled("ND and more"))
    assert (last.text, last.token_ids, last.finish_reason) == ("", spelled("ND"), "stop")
    assert emission.output().text == "so "
    assert emission.output().token_ids == spelled("so END")


def test_no_half_characters() -> None:
    emission = emission_of(every_byte())
    shown = [taken(emission, [token]).text for token in spelled("a€b😀c")]
    assert shown == ["a", "", "", "€", "b", "", "", "", "😀", "c"]


def test_an_unfinished_character_at_the_end_shows_as_the_tokenizer_shows_it() -> None:
    emission = emission_of(every_byte(), max_new_tokens=2)
    assert taken(emission, spelled("a€")).text == "a\ufffd" == decode(every_byte(), spelled("a€")[:2])


def test_end_token_inside_a_block_is_the_last_id_and_has_no_text() -> None:
    emission = emission_of(every_byte())
    event = taken(emission, [*spelled("ab"), 0, *spelled("cd")])
    assert (event.token_ids, event.text, event.finish_reason) == ([*spelled("ab"), 0], "ab", "eos")


def test_stop_token_has_no_text() -> None:
    (x,) = spelled("x")
    emission = emission_of(every_byte(), stop_token_ids=(x,))
    event = taken(emission, spelled("abxcd"))
    assert (event.token_ids, event.text, event.finish_reason) == (spelled("abx"), "ab", "stop")


def test_stop_strings_wait_for_the_minimum() -> None:
    emission = emission_of(every_byte(), stop=("b",), min_new_tokens=4)
    assert taken(emission, spelled("abab")).finish_reason == "stop"
    assert emission.output().text == "aba"


def test_held_back_text_is_given_out_at_the_end() -> None:
    emission = emission_of(every_byte(), stop=("abc",))
    assert taken(emission, spelled("xab")).text == "x"
    assert taken(emission, [0]).text == "ab"


def test_logprobs_are_float32_of_the_raw_logits() -> None:
    emission = emission_of(every_byte(), logprobs=2, temperature=0.5, repetition_penalty=2.0)
    logits = torch.randn(3, 258, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    taken(emission, [9, 10, 11], logits)
    emission.finish_reason = "length"
    output, expected = emission.output(), logits.float().log_softmax(-1)
    assert output.logprobs == pytest.approx([float(expected[i, 9 + i]) for i in range(3)])
    assert output.top_logprobs is not None
    for best, row in zip(output.top_logprobs, expected, strict=True):
        values, ids = row.topk(2)
        assert list(best) == ids.tolist()
        assert list(best.values()) == pytest.approx(values.tolist())
