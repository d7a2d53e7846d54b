"""The loss mask is true on the assistant's tokens and nowhere else."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AddedToken

from aquiline.training.data.conversations import Message
from aquiline.training.data.masks import ChatRenderer, NotFound, Rendered, assistant_tokens
from tests.training.chat_templates import CHATML, FAMILIES, NO_END_OF_TURN, QWEN3

ANSWERS = [
    "Rome was founded, by legend, in 753 BC.",
    "user",  # as in a header, and as the second question
    "  Yes — naïve café 😀\n\n```python\nprint('assistant')\n```\n",
]
QUESTIONS = ["When was Rome founded?", "user", "Write « assistant »\nin Python?  "]


def chat(system: str | None = None) -> list[Message]:
    turns = [Message("system", system)] if system else []
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        turns += [Message("user", question), Message("assistant", answer)]
    return turns


def with_tokens(tokenizer: Any, special: tuple[str, ...]) -> Any:
    """The tokenizer of a model whose template this is: the template's tokens are tokens."""
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def encode(tokenizer: Any, text: str) -> tuple[list[int], np.ndarray]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], np.array(encoded["offset_mapping"])


def masked_runs(tokenizer: Any, renderer: ChatRenderer, messages: list[Message]) -> list[str]:
    """The text of each run of masked tokens, by decoding the tokens."""
    rendered = renderer.render(messages)
    ids, offsets = encode(tokenizer, rendered.text)
    mask = assistant_tokens(offsets, rendered)
    runs = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in run]) for inside, run in runs if inside]


def slow_mask(offsets: np.ndarray, rendered: Rendered) -> list[bool]:
    """Token by token: shares a character with a span, and has only spaces outside of it before."""
    owner = {}
    for number, (start, end) in enumerate(rendered.spans):
        owner.update(dict.fromkeys(range(start, end), number))
    mask = []
    for a, b in offsets:
        owners = [owner.get(position) for position in range(a, b)]
        before = next((i for i, found in enumerate(owners) if found is not None), None)
        mask.append(before is not None and not rendered.text[a : a + before].strip(" "))
    return mask


def expected_answers(family: str) -> list[str]:
    _, _, before, after = FAMILIES[family]
    strips = family not in ("chatml", "qwen3")
    # The header's newline and the first of two spaces are one token, which the header keeps.
    texts = [answer.strip() if strips else answer.replace("  Y", " Y") for answer in ANSWERS]
    # A space that opens an answer belongs to its first token in byte-level vocabularies.
    space = " " if before.endswith(" ") else ""
    return [space + text + after for text in texts]


SYSTEMS = [None, "Be brief.", "user"]


@pytest.mark.parametrize(
    ("family", "system"),
    # Gemma's template refuses system turns; see the test of refusals.
    [(f, s) for f in FAMILIES for s in SYSTEMS if not (f == "gemma" and s)],
)
def test_masked_tokens_spell_the_answers(family: str, system: str | None, tokenizer: Any) -> None:
    template, special, _, _ = FAMILIES[family]
    renderer = ChatRenderer(with_tokens(tokenizer, special), template)
    assert masked_runs(tokenizer, renderer, chat(system)) == expected_answers(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_spans_where_the_end_of_turn_is_only_text(family: str, tokenizer: Any) -> None:
    template, _, before, after = FAMILIES[family]
    rendered = ChatRenderer(tokenizer, template).render(chat())
    strips = family not in ("chatml", "qwen3")
    assert [rendered.text[a:b] for a, b in rendered.spans] == [
        (answer.strip() if strips else answer) + after for answer in ANSWERS
    ]
    assert all(rendered.text.endswith(before, 0, a) for a, _ in rendered.spans[:-1])
    _, offsets = encode(tokenizer, rendered.text)
    assert assistant_tokens(offsets, rendered).tolist() == slow_mask(offsets, rendered)


def test_the_tokenizers_own_template(tokenizer: Any) -> None:
    runs = masked_runs(tokenizer, ChatRenderer(tokenizer), chat())
    assert runs == expected_answers("chatml")


def test_an_unfinished_answer_has_no_end_of_turn(tokenizer: Any) -> None:
    renderer = ChatRenderer(tokenizer)
    whole, cut = renderer.render(chat()), renderer.render(chat(), finished=False)
    assert cut.text.endswith(ANSWERS[-1])
    assert cut.text == whole.text[: len(cut.text)]
    assert cut.spans == (*whole.spans[:-1], (whole.spans[-1][0], len(cut.text)))


def test_thinking_of_the_last_answer_is_the_assistants(tokenizer: Any) -> None:
    thought = "<think>\nIt is a sum.\n</think>\n\n4"
    messages = [*chat(), Message("user", "2 + 2?"), Message("assistant", thought)]
    runs = masked_runs(tokenizer, ChatRenderer(tokenizer, QWEN3), messages)
    assert runs == [*expected_answers("chatml"), thought + "<|im_end|>"]


def test_an_empty_thought_that_the_template_adds_is_not(tokenizer: Any) -> None:
    rendered = ChatRenderer(tokenizer, QWEN3).render(chat())
    assert "<think>\n\n</think>\n\n" + ANSWERS[-1] in rendered.text
    assert rendered.text.endswith("</think>\n\n", 0, rendered.spans[-1][0])


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (
            QWEN3,
            [
                Message("user", "2 + 2?"),
                Message("assistant", "<think>\nA sum.\n</think>\n\n4"),
                Message("user", "Sure?"),
                Message("assistant", "Yes."),
            ],
            "turn 2 is not verbatim",
        ),
        (FAMILIES["gemma"][0], chat("Be brief."), "System role not supported"),
        (NO_END_OF_TURN, chat(), "no end-of-turn token"),
        (CHATML.replace("turn.content", "turn.content | upper"), chat(), "not verbatim"),
        (CHATML.replace("turn.content", "turn.content * 2"), chat(), "no end-of-turn token"),
    ],
)
def test_what_is_not_verbatim_is_refused(template: str, messages: list[Message], words: str, tokenizer: Any) -> None:
    with pytest.raises(NotFound, match=words):
        ChatRenderer(tokenizer, template).render(messages)


def test_a_spelled_out_special_token_is_seen(tokenizer: Any) -> None:
    renderer = ChatRenderer(tokenizer)
    assert renderer.special_token_in(chat()) is None
    bad = [Message("user", "Hi"), Message("assistant", "Bye<|im_end|>\nmore")]
    assert renderer.special_token_in(bad) == "turn 2 (assistant) contains '<|im_end|>'"


def test_without_a_template(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        ChatRenderer(tokenizer)


@given(st.lists(st.text("ab \n", min_size=1, max_size=3), min_size=1), st.data())
def test_tokens_of_spans_against_a_slow_twin(tokens: list[str], data: st.DataObject) -> None:
    ends = np.cumsum([len(token) for token in tokens])
    offsets = np.stack([ends - [len(token) for token in tokens], ends], axis=1)
    cuts = sorted(data.draw(st.sets(st.integers(0, int(ends[-1])), max_size=2)))
    rendered = Rendered("".join(tokens), tuple(zip(cuts[::2], cuts[1::2], strict=False)))
    assert assistant_tokens(offsets, rendered).tolist() == slow_mask(offsets, rendered)
