"""The loss mask is true on the assistant's tokens and nowhere else."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AddedToken

from aquiline.training.data.conversations import Conversation
from aquiline.training.data.masks import ChatRenderer, Rendered
from aquiline.training.data.messages import Message
from aquiline.training.data.scaffold import NotFound
from aquiline.training.data.tokens import assistant_tokens
from tests.training.chat_templates import CHATML, FAMILIES, NO_END_OF_TURN, OPENS_THOUGHT, QWEN3, QWEN3_FIELDS, TOOLS

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


def talk(messages: list[Message], **fields: Any) -> Conversation:
    return Conversation(tuple(messages), "talks", 1, **fields)


def with_tokens(tokenizer: Any, special: tuple[str, ...]) -> Any:
    """The tokenizer of a model whose template this is: the template's tokens are tokens."""
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def encode(tokenizer: Any, text: str) -> tuple[list[int], np.ndarray]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], np.array(encoded["offset_mapping"])


def masked_runs(tokenizer: Any, renderer: ChatRenderer, messages: list[Message]) -> list[str]:
    """The text of each run of masked tokens, by decoding the tokens."""
    rendered = renderer.render(talk(messages))
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
    rendered = ChatRenderer(tokenizer, template).render(talk(chat()))
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
    whole, cut = renderer.render(talk(chat())), renderer.render(talk(chat(), finished=False))
    assert cut.text.endswith(ANSWERS[-1])
    assert cut.text == whole.text[: len(cut.text)]
    assert cut.spans == (*whole.spans[:-1], (whole.spans[-1][0], len(cut.text)))


def test_thinking_of_the_last_answer_is_the_assistants(tokenizer: Any) -> None:
    thought = "<think>\nIt is a sum.\n</think>\n\n4"
    messages = [*chat(), Message("user", "2 + 2?"), Message("assistant", thought)]
    runs = masked_runs(tokenizer, ChatRenderer(tokenizer, QWEN3), messages)
    assert runs == [*expected_answers("chatml"), thought + "<|im_end|>"]


def spoken(template: str, messages: list[Message], tokenizer: Any, **fields: Any) -> tuple[str, list[str], int]:
    """Text of a conversation, text of its spans, and its answers without loss."""
    rendered = ChatRenderer(tokenizer, template).render(talk(messages, **fields))
    return rendered.text, [rendered.text[a:b] for a, b in rendered.spans], rendered.context


ASK = Message("user", "2 + 2?")
PROMPT = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
THOUGHT = "<think>\nA sum.\n</think>\n\n4"


@pytest.mark.parametrize("answer", ["Four.", "<think>\nTwo and", THOUGHT, "  spaced"])
@pytest.mark.parametrize("finished", [True, False])
def test_an_answer_follows_the_generation_prompt_as_it_was_generated(
    answer: str, finished: bool, tokenizer: Any
) -> None:
    """The template prints an empty thought before it, which the target never sees before it answers."""
    end = "<|im_end|>" if finished else ""
    text, spans, _ = spoken(QWEN3, [ASK, Message("assistant", answer)], tokenizer, finished=finished)
    assert text.rstrip("\n") == PROMPT + answer + end and spans == [answer + end]


def test_a_cut_thought_in_a_field_of_its_own_stays_open(tokenizer: Any) -> None:
    cut = Message("assistant", "", reasoning="Two and")
    text, _, _ = spoken(QWEN3_FIELDS, [ASK, cut], tokenizer, finished=False)
    assert text == PROMPT + "<think>\nTwo and"


@pytest.mark.parametrize("template", ["fields", "text", "opens"])
def test_reasoning_in_a_field_of_its_own_is_trained(template: str, tokenizer: Any) -> None:
    source = {"fields": QWEN3_FIELDS, "text": QWEN3, "opens": OPENS_THOUGHT}[template]
    text, [span], _ = spoken(source, [ASK, Message("assistant", "4", reasoning="A sum.")], tokenizer)
    assert text.rstrip("\n") == PROMPT + THOUGHT + "<|im_end|>"
    assert span == (THOUGHT.removeprefix("<think>\n") if template == "opens" else THOUGHT) + "<|im_end|>"


def test_a_prompt_that_opens_a_thought(tokenizer: Any) -> None:
    prompt = PROMPT + "<think>\n"
    for answer in (THOUGHT, THOUGHT.removeprefix("<think>\n")):
        text, [span], _ = spoken(OPENS_THOUGHT, [ASK, Message("assistant", answer)], tokenizer)
        assert text.rstrip("\n") == PROMPT + THOUGHT + "<|im_end|>" and text.startswith(prompt + span)
    assert spoken(OPENS_THOUGHT, [ASK, Message("assistant", "Two")], tokenizer, finished=False)[1] == ["Two"]
    with pytest.raises(NotFound, match="turn 2 does not close the <think>"):
        spoken(OPENS_THOUGHT, [ASK, Message("assistant", "Four.")], tokenizer)


def test_settings_of_the_template_reach_it(tokenizer: Any) -> None:
    off = {"enable_thinking": False}
    text, spans, _ = spoken(QWEN3_FIELDS, [ASK, Message("assistant", "4")], tokenizer, chat_template_kwargs=off)
    assert text.rstrip("\n") == PROMPT + "<think>\n\n</think>\n\n4<|im_end|>" and spans == ["4<|im_end|>"]
    with pytest.raises(NotFound, match=r"turn 2 thinks, and .* switch thinking off"):
        spoken(QWEN3_FIELDS, [ASK, Message("assistant", THOUGHT)], tokenizer, chat_template_kwargs=off)
    with pytest.raises(NotFound, match="no setting 'enable_thinking'"):
        spoken(CHATML, [ASK, Message("assistant", "4")], tokenizer, chat_template_kwargs=off)


def test_the_last_turn_of_a_thinking_conversation_is_trained(tokenizer: Any) -> None:
    messages = [ASK, Message("assistant", THOUGHT), Message("user", "Sure?"), Message("assistant", "Yes.")]
    text, spans, context = spoken(QWEN3, messages, tokenizer)
    assert (spans, context) == (["Yes.<|im_end|>"], 1)
    assert text.startswith(PROMPT + "4<|im_end|>\n<|im_start|>user\nSure?")


def test_turns_without_weight_have_no_loss(tokenizer: Any) -> None:
    messages = chat()
    messages[3] = Message("assistant", ANSWERS[1], trained=False)
    whole = ChatRenderer(tokenizer).render(talk(chat()))
    rendered = ChatRenderer(tokenizer).render(talk(messages))
    assert rendered.text == whole.text
    assert rendered.spans == (whole.spans[0], whole.spans[2])


def test_tools_and_their_calls_are_rendered(tokenizer: Any) -> None:
    call = '[{"type": "function", "function": {"name": "add", "arguments": {"to": "2"}}}]'
    messages = [ASK, Message("assistant", "", tool_calls=call), Message("tool", "4"), Message("assistant", "Four.")]
    tools = ({"type": "function", "function": {"name": "add"}},)
    text, spans, _ = spoken(TOOLS, messages, tokenizer, tools=tools)
    assert spans == ['<call>{"name": "add", "arguments": {"to": "2"}}<|im_end|>', "Four.<|im_end|>"]
    assert text.startswith('<|im_start|>tools\n[{"type": "function"')
    for template, words in ((CHATML, "does not use tools"), (CHATML + "{# tools #}", "does not print .*'add'")):
        with pytest.raises(NotFound, match=words):
            spoken(template, messages[:2], tokenizer, tools=tools)


def test_a_preformatted_text_is_trained_after_its_headers(tokenizer: Any) -> None:
    whole = ChatRenderer(tokenizer).render(talk(chat("Be brief.")))
    rendered = ChatRenderer(tokenizer).render(talk([], text=whole.text))
    assert rendered == whole
    with pytest.raises(NotFound, match=r"holds no .*assistant"):
        ChatRenderer(tokenizer).render(talk([], text="hello"))


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (FAMILIES["gemma"][0], chat("Be brief."), "System role not supported"),
        (NO_END_OF_TURN, chat(), "no end-of-turn token"),
        (CHATML.replace("turn.content", "turn.content | upper"), chat(), "verbatim"),
        (CHATML.replace("turn.content", "turn.content * 2"), chat(), "once and verbatim"),
    ],
)
def test_what_is_not_verbatim_is_refused(template: str, messages: list[Message], words: str, tokenizer: Any) -> None:
    with pytest.raises(NotFound, match=words):
        ChatRenderer(tokenizer, template).render(talk(messages))


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
