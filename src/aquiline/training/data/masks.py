"""Renders a conversation as the target would see and say it, and finds the assistant's characters.

The template is a black box. Rendered once with a unique marker in place of every content, it
reveals its *scaffold*, the text around the contents:

    <|im_start|>user\n ⟨0⟩ <|im_end|>\n<|im_start|>assistant\n ⟨1⟩ <|im_end|>\n

The real rendering must then be scaffold, content, scaffold, … character by character, which locates each turn
exactly even if its text also occurs in a header or in another turn, and each answer must follow the generation
prompt of the turns before it.

Templates that inspect the contents (Qwen3 treats thinking separately) break this rule. Then the text is built as
the target generates it: the generation prompt of the earlier turns, the words of the last answer, its end of turn.
An earlier answer has loss only where the same holds for it. A conversation whose last answer cannot be placed so is
rejected: turns are never guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from aquiline.engine.template import apply_template
from aquiline.training.data.conversations import Conversation, Message

_MARKER = re.compile(r"qzMARK(\d+)KRAMzq")
_THOUGHTS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))
"""What opens and closes thoughts in the text of an answer."""


@dataclass(frozen=True)
class _Scaffold:
    """The template's own text (str) and the messages' indices (int) in rendered order.

    `seen` is True if each answer follows the generation prompt of the turns before it.
    """

    pieces: tuple[str | int, ...]
    seen: bool


@dataclass(frozen=True)
class _Asked:
    """What the renderings of one conversation share: the tools, and the template's settings."""

    tools: tuple[Mapping[str, Any], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return json.dumps([self.tools, self.settings], default=str) if self.tools or self.settings else ""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with the assistant's spans.

    `spans` are half-open character ranges in `text`, one per assistant turn with loss, from the first
    character of its content to the last one of its end-of-turn token. `context` counts the earlier answers
    without loss, because the template prints them other than they were generated.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    context: int = 0


class NotFound(ValueError):
    """An assistant turn cannot be placed verbatim in the rendered conversation."""


class ChatRenderer:
    """Renders conversations with one tokenizer's template and caches its scaffolds.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        template: replaces the tokenizer's own template.
        settings: variables of the template for all conversations, such as ``enable_thinking``.

    Raises:
        ValueError: if there is no template.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, settings: Mapping[str, Any] | None = None) -> None:
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
        self._settings = dict(settings or {})
        self._scaffolds: dict[tuple[Any, ...], _Scaffold] = {}
        special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        special.update(token for token in tokenizer.all_special_tokens if token)
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len)[::-1])) or "(?!)")
        # A token that opens the next turn does not end one, unless one token does both.
        self._begins = tokenizer.bos_token if tokenizer.bos_token != tokenizer.eos_token else None

    def special_token_in(self, messages: Sequence[Message]) -> str | None:
        """Describes the first special token that occurs in a content, with its turn; None without one."""
        for number, message in enumerate(messages, 1):
            for found in self._special.finditer(f"{message.content}\n{message.reasoning}"):
                thought = message.role == "assistant" and any(found[0] in pair for pair in _THOUGHTS)
                if not thought:
                    return f"turn {number} ({message.role}) contains {found[0]!r}"
        return None

    def render(self, conversation: Conversation) -> Rendered:
        """Renders a conversation and locates every answer with loss.

        If the conversation is not finished, the text ends with the last answer: its author did not end the turn.

        Raises:
            NotFound: the last answer cannot be placed as the target would generate it, a turn is not in the
                rendering, nothing marks the end of an answer, or the template rejects the messages.
        """
        asked = _Asked(conversation.tools, {**self._settings, **conversation.chat_template_kwargs})
        if conversation.text:
            return self._preformatted(conversation.text, conversation.finished, asked)
        messages, finished = conversation.messages, conversation.finished
        prompt = self._apply(messages[:-1], asked, prompt=True)
        plain = not any(m.reasoning or m.tool_calls or m.role == "tool" for m in messages)
        found = self._by_scaffold(messages, prompt, asked) if plain else None
        text, places = found or self._as_generated(messages, prompt, finished, asked)
        spans = []
        for index, start, end in places:
            last = index == len(messages) - 1
            if last and not finished:
                text = text[:end]
            else:
                end = self._end_of_turn(text, end, asked)
            if messages[index].trained:
                spans.append((start, end))
        if not spans:
            raise NotFound("the only answers with weight 1 are not verbatim in the rendered conversation")
        return Rendered(text, tuple(spans), sum(m.role == "assistant" for m in messages) - len(places))

    def _apply(self, messages: Sequence[Message], asked: _Asked, prompt: bool = False) -> str:
        try:
            return apply_template(
                self._tokenizer,
                [m.as_dict() for m in messages],
                prompt=prompt,
                template=self.template,
                tools=asked.tools,
                settings=asked.settings,
            )
        except ValueError as error:
            raise NotFound(str(error)) from error

    def _scaffold(self, roles: tuple[str, ...], asked: _Asked) -> _Scaffold:
        key = (roles, asked.key)
        if key not in self._scaffolds:
            marked = [Message(role, f"qzMARK{i}KRAMzq") for i, role in enumerate(roles)]
            text = self._apply(marked, asked)
            pieces: list[str | int] = list(_MARKER.split(text))
            pieces[1::2] = [int(piece) for piece in pieces[1::2]]
            seen = all(
                self._follows(text, text.find(marked[i].content), marked[:i], asked)
                for i, role in enumerate(roles)
                if role == "assistant"
            )
            if len(self._scaffolds) > 4096:
                self._scaffolds.clear()
            self._scaffolds[key] = _Scaffold(tuple(pieces), seen)
        return self._scaffolds[key]

    def _follows(self, text: str, start: int, earlier: Sequence[Message], asked: _Asked, prompt: str = "") -> bool:
        """True if only white space stands between the generation prompt of the earlier turns and an answer."""
        prompt = prompt or self._apply(earlier, asked, prompt=True)
        if text.startswith(prompt) and not text[len(prompt) : start].strip():
            return True
        # A template without a generation prompt leaves its place to the scaffold.
        return prompt == self._apply(earlier, asked) and text.startswith(prompt)

    def _by_scaffold(
        self, messages: Sequence[Message], prompt: str, asked: _Asked
    ) -> tuple[str, list[tuple[int, int, int]]] | None:
        """Returns the rendering and (index, start, end) of each answer, or None if it is not its scaffold's."""
        text = self._apply(messages, asked)
        scaffold = self._scaffold(tuple(m.role for m in messages), asked)
        pieces = scaffold.pieces
        if not scaffold.seen or not text.startswith(str(pieces[0])):
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
        complete = len(places) == sum(m.role == "assistant" for m in messages) and position == len(text)
        if not complete or not self._follows(text, places[len(messages) - 1][0], messages[:-1], asked, prompt):
            return None
        return text, [(i, *places[i]) for i in sorted(places)]

    def _as_generated(
        self, messages: Sequence[Message], prompt: str, finished: bool, asked: _Asked
    ) -> tuple[str, list[tuple[int, int, int]]]:
        """Builds the text from the generation prompt and the last answer's words; places answers in it."""
        ending = self._ending(asked)
        words = self._words(messages, len(messages) - 1, prompt, finished, asked)
        text = prompt + words + (ending if finished else "")
        places = []
        for index, message in enumerate(messages[:-1]):
            if message.role != "assistant":
                if not any(content in prompt for content in _trimmings(message.content)):
                    raise NotFound(f"turn {index + 1} is not verbatim in the rendered conversation")
                continue
            before = self._apply(messages[:index], asked, prompt=True)
            said = self._words_or_none(messages, index, before, asked)
            if said is not None and text.startswith(before + said):
                places.append((index, len(before), len(before) + len(said)))
            elif not any(shown in prompt for shown in _trimmings(_without_thoughts(message.content))):
                raise NotFound(f"turn {index + 1} is not verbatim in the rendered conversation")
        return text, [*places, (len(messages) - 1, len(prompt), len(prompt) + len(words))]

    def _words_or_none(self, messages: Sequence[Message], index: int, prompt: str, asked: _Asked) -> str | None:
        try:
            return self._words(messages, index, prompt, True, asked)
        except NotFound:
            return None

    def _words(self, messages: Sequence[Message], index: int, prompt: str, finished: bool, asked: _Asked) -> str:
        """Returns an answer as the target generates it after the prompt: thoughts, content, calls of tools."""
        message = messages[index]
        if message.reasoning or message.tool_calls:
            return self._structured(messages[: index + 1], prompt, finished, asked)
        words, end = message.content, prompt.rstrip()
        for opening, closing in _THOUGHTS:
            thinks = words.lstrip().startswith(opening)
            if end.endswith(opening):
                words = words.lstrip().removeprefix(opening)
                words = words.removeprefix("\n") if thinks and prompt.endswith("\n") else words
                if closing not in words and finished:
                    raise NotFound(f"turn {index + 1} does not close the {opening} that the generation prompt opens")
            elif end.endswith(closing) and thinks:
                raise NotFound(f"turn {index + 1} thinks, and the template's settings switch thinking off")
        return words

    def _structured(self, messages: Sequence[Message], prompt: str, finished: bool, asked: _Asked) -> str:
        """Returns the last answer as the template prints its separate thoughts and calls of tools."""
        message, number = messages[-1], len(messages)
        text, ending = self._apply(messages, asked), self._ending(asked)
        cut_in_thought = not finished and not message.content and not message.tool_calls
        if not cut_in_thought and text.startswith(prompt) and text.endswith(ending):
            words = text[len(prompt) : len(text) - len(ending)]
            if all(part in words for part in (message.reasoning.strip(), message.content.strip(), *_called(message))):
                return words
        thoughts = [pair for pair in _THOUGHTS if pair[1] in self.template]
        if message.tool_calls or not thoughts or prompt.rstrip().endswith(thoughts[0][1]):
            raise NotFound(f"turn {number}: the chat template does not print its reasoning or its tool calls")
        opening, closing = thoughts[0]
        opened = "" if prompt.rstrip().endswith(opening) else f"{opening}\n"
        if cut_in_thought:
            return opened + message.reasoning.lstrip("\n")
        return f"{opened}{message.reasoning.strip(chr(10))}\n{closing}\n\n{message.content}"

    def _preformatted(self, text: str, finished: bool, asked: _Asked) -> Rendered:
        """Locates the answers of a text that a template has printed already, by its headers and ends of turns."""
        question = [Message("user", "qzMARK0KRAMzq")]
        header = self._apply(question, asked, prompt=True).removeprefix(self._apply(question, asked))
        for opening, _ in _THOUGHTS:
            header = header.split(opening)[0]
        ending = self._ending(asked).strip()
        if not header.strip() or not ending:
            raise NotFound("the chat template has no generation prompt or end of turn to find answers by")
        spans, position = [], 0
        while (found := text.find(header, position)) >= 0:
            start = found + len(header)
            end = text.find(ending, start)
            position = len(text) if end < 0 else end + len(ending)
            spans.append((start, position))
        if not spans:
            raise NotFound(f"the text holds no {header.strip()!r}, which the chat template prints before an answer")
        if not finished and text[spans[-1][1] :].strip() == "" and text.rstrip().endswith(ending):
            raise NotFound("the text is marked as unfinished, and ends with an end of turn")
        return Rendered(text, tuple(spans))

    def _ending(self, asked: _Asked) -> str:
        """Returns what the template prints after the last answer."""
        pieces = self._scaffold(("user", "assistant"), asked).pieces
        if pieces[1::2] != (0, 1):
            raise NotFound("the chat template does not print every turn once and verbatim")
        return str(pieces[-1])

    def _end_of_turn(self, text: str, content_end: int, asked: _Asked) -> int:
        """Returns the end of the end-of-turn token after a content (after optional white space)."""
        start = content_end
        while start < len(text) and text[start].isspace():
            start += 1
        special = self._special.match(text, start)
        if special and special[0] != self._begins:
            return special.end()
        marker = self._literal_end(asked)
        if not marker or not text.startswith(marker, content_end):
            raise NotFound("the chat template puts no end-of-turn token after an answer")
        return content_end + len(marker)

    def _literal_end(self, asked: _Asked) -> str:
        """Returns the text that follows an answer both at the end and before another turn, e.g. ``</s>``."""
        last = str(self._scaffold(("user", "assistant"), asked).pieces[-1])
        longer = self._scaffold(("user", "assistant") * 2, asked).pieces
        middle = str(longer[longer.index(1) + 1])
        same = 0
        while same < min(len(last), len(middle)) and last[same] == middle[same]:
            same += 1
        return last[:same].rstrip()


def _without_thoughts(content: str) -> str:
    """Returns the part of an answer that templates keep in later turns."""
    for _, closing in _THOUGHTS:
        content = content.rpartition(closing)[2]
    return content


def _called(message: Message) -> Iterator[str]:
    """Yields the names and the texts among the arguments of a turn's tool calls."""
    for call in json.loads(message.tool_calls or "[]"):
        yield call["function"]["name"]
        arguments = call["function"]["arguments"]
        for value in arguments.values() if isinstance(arguments, dict) else ():
            if isinstance(value, str):
                yield json.dumps(value, ensure_ascii=False)[1:-1]


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
