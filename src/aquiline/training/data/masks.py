"""Renders a conversation with the target's chat template and find the assistant's characters.

The template is a black box. Rendered once with a unique marker in place of every content, it
reveals its *scaffold*, the text around the contents:

    <|im_start|>user\n ⟨0⟩ <|im_end|>\n<|im_start|>assistant\n ⟨1⟩ <|im_end|>\n

The real rendering must then be scaffold, content, scaffold, … character by character, which locates
each turn exactly even if its text also occurs in a header or in another turn. Templates that inspect
the contents (Qwen3 treats thinking separately) break this rule; then a turn must follow the
generation prompt of the earlier turns verbatim. Otherwise the conversation is rejected: turns are
never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aquiline.training.data.conversations import Message

_MARKER = re.compile(r"qzMARK(\d+)KRAMzq")


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with the assistant's spans.

    `spans` are half-open character ranges in `text`, one per assistant turn, from the first
    character of its content to the last one of its end-of-turn token.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


class NotFound(ValueError):
    """An assistant turn does not occur verbatim in the rendered conversation."""


class ChatRenderer:
    """Renders conversations with one tokenizer's template and caches its scaffolds.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        template: replaces the tokenizer's own template.

    Raises:
        ValueError: if there is no template.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        template = template or tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; allowed: one with `chat_template` "
                "set; use the instruction-tuned model's tokenizer, or give a template "
                "(`aquiline prepare --chat-template FILE`)"
            )
        self.template: str = template
        self._tokenizer = tokenizer
        self._scaffolds: dict[tuple[str, ...], list[str | int]] = {}
        special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        special.update(token for token in tokenizer.all_special_tokens if token)
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len)[::-1])) or "(?!)")
        # A token that opens the next turn does not end one, unless one token does both.
        self._begins = tokenizer.bos_token if tokenizer.bos_token != tokenizer.eos_token else None

    def special_token_in(self, messages: Sequence[Message]) -> str | None:
        """Describes the first special token that occurs in a content, with its turn; None without one."""
        for number, message in enumerate(messages, 1):
            found = self._special.search(message.content)
            if found:
                return f"turn {number} ({message.role}) contains {found[0]!r}"
        return None

    def render(self, messages: Sequence[Message], finished: bool = True) -> Rendered:
        """Renders and locate every assistant turn.

        Args:
            messages: the conversation.
            finished: False if the last answer was cut off; the text then ends with the answer, since
                its author did not end the turn.

        Raises:
            NotFound: a turn does not occur verbatim (apart from white space at its ends, which many
                templates strip), nothing marks its end, or the template rejects the messages.
        """
        text = self._apply(messages)
        places = self._by_scaffold(text, messages)
        if places is None:
            places = self._by_generation_prompt(text, messages)
        spans = [(start, self._end_of_turn(text, end)) for start, end in places]
        if not finished:
            spans[-1] = places[-1]
            text = text[: places[-1][1]]
        return Rendered(text, tuple(spans))

    def _apply(self, messages: Sequence[Message], prompt: bool = False) -> str:
        from jinja2 import TemplateError

        turns = [{"role": m.role, "content": m.content} for m in messages]
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns, chat_template=self.template, tokenize=False, add_generation_prompt=prompt
            )
        except TemplateError as error:
            raise NotFound(f"the chat template rejects it: {error}") from error
        return text

    def _scaffold(self, messages: Sequence[Message]) -> list[str | int]:
        """The template's own text (str) and the messages' indices (int) in rendered order."""
        roles = tuple(m.role for m in messages)
        if roles not in self._scaffolds:
            marked = [Message(role, f"qzMARK{i}KRAMzq") for i, role in enumerate(roles)]
            pieces: list[str | int] = list(_MARKER.split(self._apply(marked)))
            pieces[1::2] = [int(piece) for piece in pieces[1::2]]
            if len(self._scaffolds) > 4096:
                self._scaffolds.clear()
            self._scaffolds[roles] = pieces
        return self._scaffolds[roles]

    def _by_scaffold(self, text: str, messages: Sequence[Message]) -> list[tuple[int, int]] | None:
        pieces = self._scaffold(messages)
        if not text.startswith(str(pieces[0])):
            return None
        places: dict[int, tuple[int, int]] = {}
        position = len(str(pieces[0]))
        for index, following in zip(pieces[1::2], pieces[2::2], strict=True):
            assert isinstance(index, int) and isinstance(following, str)
            for content in _trimmings(messages[index].content):
                end = position + len(content)
                if text.startswith(content, position) and text.startswith(following, end):
                    break
            else:
                return None
            if messages[index].role == "assistant":
                if index in places:
                    return None  # printed twice, so its place is ambiguous
                places[index] = (position, end)
            position = end + len(following)
        complete = len(places) == sum(m.role == "assistant" for m in messages)
        return [places[i] for i in sorted(places)] if complete and position == len(text) else None

    def _by_generation_prompt(self, text: str, messages: Sequence[Message]) -> list[tuple[int, int]]:
        places = []
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            prompt = self._apply(messages[:index], prompt=True)
            found = [content for content in _trimmings(message.content) if text.startswith(content, len(prompt))]
            if not text.startswith(prompt) or not found:
                raise NotFound(f"turn {index + 1} is not verbatim in the rendered conversation")
            places.append((len(prompt), len(prompt) + len(found[0])))
        return places

    def _end_of_turn(self, text: str, content_end: int) -> int:
        """Returns the end of the end-of-turn token after a content (after optional white space)."""
        start = content_end
        while start < len(text) and text[start].isspace():
            start += 1
        special = self._special.match(text, start)
        if special and special[0] != self._begins:
            return special.end()
        marker = self._literal_end()
        if not marker or not text.startswith(marker, content_end):
            raise NotFound("the chat template puts no end-of-turn token after an answer")
        return content_end + len(marker)

    def _literal_end(self) -> str:
        """Returns the text that follows an answer both at the end and before another turn, e.g. ``</s>``."""
        pair = (Message("user", ""), Message("assistant", ""))
        last = str(self._scaffold(pair)[-1])
        longer = self._scaffold(pair * 2)
        middle = str(longer[longer.index(1) + 1])
        same = 0
        while same < min(len(last), len(middle)) and last[same] == middle[same]:
            same += 1
        return last[:same].rstrip()


def assistant_tokens(offsets: npt.NDArray[np.int64], rendered: Rendered) -> npt.NDArray[np.bool_]:
    """Converts the assistant's character spans to tokens.

    A token belongs to the assistant if it shares a character with a span. The first one may start
    with spaces before the span (vocabularies put a word's space into its token), but not with other
    text of the template: a newline of the header that was merged with white space of the answer is
    given to the model, not predicted by it. Each span's tokens form one run, so that tokens without
    their own offsets (bytes of one character, white space in some vocabularies) are not lost.

    Args:
        offsets: (T, 2) half-open character range of each token, non-decreasing.
        rendered: the text and its spans.

    Returns:
        (T,) bool.
    """
    mask = np.zeros(len(offsets), dtype=np.bool_)
    for start, end in rendered.spans:
        spaces = start
        while spaces and rendered.text[spaces - 1] == " ":
            spaces -= 1
        first = max(
            np.searchsorted(offsets[:, 1], start, side="right"),
            np.searchsorted(offsets[:, 0], spaces, side="left"),
        )
        last = np.searchsorted(offsets[:, 0], end, side="left")
        mask[first:last] = True
    return mask


def _trimmings(content: str) -> Iterator[str]:
    """Yields the content as a template may print it: unchanged, or without white space at its ends."""
    yield content
    yield content.strip()
    yield content.lstrip()
    yield content.rstrip()
    yield content.strip("\n")
    yield content.lstrip("\n")
    yield content.rstrip("\n")
