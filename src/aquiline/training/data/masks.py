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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aquiline.training.data.conversations import Conversation
from aquiline.training.data.messages import Message
from aquiline.training.data.scaffold import Asked, ChatTemplate, NotFound

_THOUGHTS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))
"""Marks that open and close thoughts in the text of an answer."""


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


class ChatRenderer:
    """Renders conversations with one tokenizer's template; for the arguments see `ChatTemplate`."""

    def __init__(self, tokenizer: Any, template: str | None = None, settings: Mapping[str, Any] | None = None) -> None:
        self._chat = ChatTemplate(tokenizer, template, settings)

    @property
    def template(self) -> str:
        """The template's source."""
        return self._chat.text

    def special_token_in(self, messages: Sequence[Message]) -> str | None:
        """Describes the first special token that occurs in a content, with its turn; None without one."""
        for number, message in enumerate(messages, 1):
            for found in self._chat.special.finditer(f"{message.content}\n{message.reasoning}"):
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
        asked = Asked(conversation.tools, {**self._chat.settings, **conversation.chat_template_kwargs})
        if conversation.text:
            return self._preformatted(conversation.text, conversation.finished, asked)
        messages, finished = conversation.messages, conversation.finished
        prompt = self._chat.apply(messages[:-1], asked, prompt=True)
        plain = not any(m.reasoning or m.tool_calls or m.role == "tool" for m in messages)
        found = self._by_scaffold(messages, prompt, asked) if plain else None
        text, places = found or self._as_generated(messages, prompt, finished, asked)
        spans = []
        for index, start, end in places:
            last = index == len(messages) - 1
            if last and not finished:
                text = text[:end]
            else:
                end = self._chat.end_of_turn(text, end, asked)
            if messages[index].trained:
                spans.append((start, end))
        if not spans:
            raise NotFound("the only answers with weight 1 are not verbatim in the rendered conversation")
        return Rendered(text, tuple(spans), sum(m.role == "assistant" for m in messages) - len(places))

    def _by_scaffold(
        self, messages: Sequence[Message], prompt: str, asked: Asked
    ) -> tuple[str, list[tuple[int, int, int]]] | None:
        """Returns the rendering and (index, start, end) of each answer, or None if it is not its scaffold's."""
        text = self._chat.apply(messages, asked)
        scaffold = self._chat.scaffold(tuple(m.role for m in messages), asked)
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
        if not complete or not self._chat.follows(text, places[len(messages) - 1][0], messages[:-1], asked, prompt):
            return None
        return text, [(i, *places[i]) for i in sorted(places)]

    def _as_generated(
        self, messages: Sequence[Message], prompt: str, finished: bool, asked: Asked
    ) -> tuple[str, list[tuple[int, int, int]]]:
        """Builds the text from the generation prompt and the last answer's words; places answers in it."""
        ending = self._chat.ending(asked)
        words = self._words(messages, len(messages) - 1, prompt, finished, asked)
        text = prompt + words + (ending if finished else "")
        places = []
        for index, message in enumerate(messages[:-1]):
            if message.role != "assistant":
                if not any(content in prompt for content in _trimmings(message.content)):
                    raise NotFound(f"turn {index + 1} is not verbatim in the rendered conversation")
                continue
            before = self._chat.apply(messages[:index], asked, prompt=True)
            said = None
            with suppress(NotFound):
                said = self._words(messages, index, before, True, asked)
            if said is not None and text.startswith(before + said):
                places.append((index, len(before), len(before) + len(said)))
            elif not any(shown in prompt for shown in _trimmings(_without_thoughts(message.content))):
                raise NotFound(f"turn {index + 1} is not verbatim in the rendered conversation")
        return text, [*places, (len(messages) - 1, len(prompt), len(prompt) + len(words))]

    def _words(self, messages: Sequence[Message], index: int, prompt: str, finished: bool, asked: Asked) -> str:
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

    def _structured(self, messages: Sequence[Message], prompt: str, finished: bool, asked: Asked) -> str:
        """Returns the last answer as the template prints its separate thoughts and calls of tools."""
        message, number = messages[-1], len(messages)
        text, ending = self._chat.apply(messages, asked), self._chat.ending(asked)
        cut_in_thought = not finished and not message.content and not message.tool_calls
        if not cut_in_thought and text.startswith(prompt) and text.endswith(ending):
            words = text[len(prompt) : len(text) - len(ending)]
            if all(part in words for part in (message.reasoning.strip(), message.content.strip(), *_called(message))):
                return words
        thoughts = [pair for pair in _THOUGHTS if pair[1] in self._chat.text]
        if message.tool_calls or not thoughts or prompt.rstrip().endswith(thoughts[0][1]):
            raise NotFound(f"turn {number}: the chat template does not print its reasoning or its tool calls")
        opening, closing = thoughts[0]
        opened = "" if prompt.rstrip().endswith(opening) else f"{opening}\n"
        if cut_in_thought:
            return opened + message.reasoning.lstrip("\n")
        return f"{opened}{message.reasoning.strip(chr(10))}\n{closing}\n\n{message.content}"

    def _preformatted(self, text: str, finished: bool, asked: Asked) -> Rendered:
        """Locates the answers of a text that a template has printed already, by its headers and ends of turns."""
        question = [Message("user", "qzMARK0KRAMzq")]
        header = self._chat.apply(question, asked, prompt=True).removeprefix(self._chat.apply(question, asked))
        for opening, _ in _THOUGHTS:
            header = header.split(opening)[0]
        ending = self._chat.ending(asked).strip()
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


def _trimmings(content: str) -> Iterator[str]:
    """Yields the content as a template may print it: unchanged, or without white space at its ends."""
    yield content
    yield content.strip()
    yield content.lstrip()
    yield content.rstrip()
    yield content.strip("\n")
    yield content.lstrip("\n")
    yield content.rstrip("\n")
