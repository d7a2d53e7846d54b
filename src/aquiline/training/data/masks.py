"""Render a conversation with the target's chat template and find the assistant's characters.

The template is treated as a black box. Rendered once with a unique marker in place of every
content, it shows its *scaffold*, the text around the contents:

    <|im_start|>user\n ⟨0⟩ <|im_end|>\n<|im_start|>assistant\n ⟨1⟩ <|im_end|>\n

The real rendering must then be scaffold, content, scaffold, ... character by character, which
gives each turn's exact place even if its text also occurs in a header or in another turn.
Templates that look into the contents (Qwen3 treats thinking apart) break that; then a turn
must follow verbatim on the generation prompt of the turns before it. Else it is not found,
and the conversation is refused instead of guessed.
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

    ``spans`` are half-open character ranges in ``text``, one per assistant turn, each from
    the first character of the turn's content to the last one of its end-of-turn token.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


class NotFound(ValueError):
    """An assistant turn's text does not stand verbatim in the rendered conversation."""


class ChatRenderer:
    """Renders conversations with one tokenizer's template, remembering its scaffolds.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        template: another template to use instead of the tokenizer's own.

    Raises:
        ValueError: there is no template.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        template = template or tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; allowed is one "
                "with `chat_template` set; take the instruction-tuned model's tokenizer, or give a template "
                "(`aquiline prepare --chat-template FILE`)"
            )
        self.template: str = template
        self._tokenizer = tokenizer
        self._scaffolds: dict[tuple[str, ...], list[str | int]] = {}
        special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        special.update(token for token in tokenizer.all_special_tokens if token)
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len)[::-1])) or "(?!)")
        # A token that opens the next turn ends none, unless one token does both.
        self._begins = tokenizer.bos_token if tokenizer.bos_token != tokenizer.eos_token else None

    def special_token_in(self, messages: Sequence[Message]) -> str | None:
        """The first special token that a content spells out, with its turn, or None."""
        for number, message in enumerate(messages, 1):
            found = self._special.search(message.content)
            if found:
                return f"turn {number} ({message.role}) contains {found[0]!r}"
        return None

    def render(self, messages: Sequence[Message], finished: bool = True) -> Rendered:
        """Render and locate every assistant turn.

        Args:
            messages: the conversation.
            finished: false if the last answer was cut off; the text then ends with it, for
                what the template would put after it is not what its author said next.

        Raises:
            NotFound: a turn is not there verbatim (white space at its ends aside, which many
                templates strip), nothing marks its end, or the template refuses the messages.
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
            raise NotFound(f"the chat template refuses it: {error}") from error
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
                    return None  # printed twice: which one is the turn?
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
        """End of the end-of-turn token after a content (white space may stand between)."""
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
        """What follows an answer both at the end and before a next turn, e.g. ``</s>``."""
        pair = (Message("user", ""), Message("assistant", ""))
        last = str(self._scaffold(pair)[-1])
        longer = self._scaffold(pair * 2)
        middle = str(longer[longer.index(1) + 1])
        same = 0
        while same < min(len(last), len(middle)) and last[same] == middle[same]:
            same += 1
        return last[:same].rstrip()


def assistant_tokens(offsets: npt.NDArray[np.int64], rendered: Rendered) -> npt.NDArray[np.bool_]:
    """Carry the assistant's character spans over to tokens.

    A token is the assistant's if it shares a character with a span. The first one may begin
    with spaces that stand before the span (vocabularies put a word's space into its token),
    but not with other text of the template: a newline that closes the header and melted into
    white space of the answer is given to the model, not asked of it. Each span's tokens are
    one run, so that those without offsets of their own (bytes of one character, white space
    in some vocabularies) are not lost.

    Args:
        offsets: (T, 2) half-open character range of each token, not decreasing.
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
    """The content as a template may print it: as it is, or without white space at its ends."""
    yield content
    yield content.strip()
    yield content.lstrip()
    yield content.rstrip()
    yield content.strip("\n")
    yield content.lstrip("\n")
    yield content.rstrip("\n")
