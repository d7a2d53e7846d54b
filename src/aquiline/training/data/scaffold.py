"""Applies a chat template and learns its scaffold: the text that it prints around the contents of turns."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from aquiline.engine.template import apply_template
from aquiline.training.data.messages import Message

_MARKER = re.compile(r"qzMARK(\d+)KRAMzq")


@dataclass(frozen=True)
class Scaffold:
    """The template's own text (str) and the messages' indices (int) in rendered order.

    `seen` is True if each answer follows the generation prompt of the turns before it.
    """

    pieces: tuple[str | int, ...]
    seen: bool


@dataclass(frozen=True)
class Asked:
    """The tools and template variables of one conversation."""

    tools: tuple[Mapping[str, Any], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Distinguishes cached scaffolds; empty without tools and settings."""
        return json.dumps([self.tools, self.settings], default=str) if self.tools or self.settings else ""


class NotFound(ValueError):
    """An assistant turn cannot be placed verbatim in the rendered conversation."""


class Rejected(NotFound):
    """The chat template rejects the conversation, its tools or its settings."""


class ChatTemplate:
    """A tokenizer's chat template, which caches its scaffolds.

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
        self.text: str = template
        self._tokenizer = tokenizer
        self.settings = dict(settings or {})
        self._scaffolds: dict[tuple[Any, ...], Scaffold] = {}
        special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        special.update(token for token in tokenizer.all_special_tokens if token)
        self.special = re.compile("|".join(map(re.escape, sorted(special, key=len)[::-1])) or "(?!)")
        # A token that opens the next turn does not end one, unless one token does both.
        self._begins = tokenizer.bos_token if tokenizer.bos_token != tokenizer.eos_token else None

    def apply(self, messages: Sequence[Message], asked: Asked, prompt: bool = False) -> str:
        """Renders messages, with the generation prompt at the end if `prompt`.

        Raises:
            Rejected: if the template rejects them.
        """
        try:
            return apply_template(
                self._tokenizer,
                [m.as_dict() for m in messages],
                prompt=prompt,
                template=self.text,
                tools=asked.tools,
                settings=asked.settings,
            )
        except (ValueError, TypeError) as error:
            raise Rejected(str(error)) from error

    def scaffold(self, roles: tuple[str, ...], asked: Asked) -> Scaffold:
        """Learns, by markers in place of contents, the text around turns of these roles."""
        key = (roles, asked.key)
        if key not in self._scaffolds:
            marked = [Message(role, f"qzMARK{i}KRAMzq") for i, role in enumerate(roles)]
            text = self.apply(marked, asked)
            pieces: list[str | int] = list(_MARKER.split(text))
            pieces[1::2] = [int(piece) for piece in pieces[1::2]]
            seen = all(
                self.follows(text, text.find(marked[i].content), marked[:i], asked)
                for i, role in enumerate(roles)
                if role == "assistant"
            )
            if len(self._scaffolds) > 4096:
                self._scaffolds.clear()
            self._scaffolds[key] = Scaffold(tuple(pieces), seen)
        return self._scaffolds[key]

    def follows(self, text: str, start: int, earlier: Sequence[Message], asked: Asked, prompt: str = "") -> bool:
        """True if only white space stands between the generation prompt of the earlier turns and an answer."""
        prompt = prompt or self.apply(earlier, asked, prompt=True)
        if text.startswith(prompt) and not text[len(prompt) : start].strip():
            return True
        # A template without a generation prompt leaves its place to the scaffold.
        return prompt == self.apply(earlier, asked) and text.startswith(prompt)

    def ending(self, asked: Asked) -> str:
        """Returns the text that the template prints after the last answer."""
        pieces = self.scaffold(("user", "assistant"), asked).pieces
        if pieces[1::2] != (0, 1):
            raise NotFound("the chat template does not print every turn once and verbatim")
        return str(pieces[-1])

    def end_of_turn(self, text: str, content_end: int, asked: Asked) -> int:
        """Returns the end of the end-of-turn token after a content (after optional white space)."""
        start = content_end
        while start < len(text) and text[start].isspace():
            start += 1
        special = self.special.match(text, start)
        if special and special[0] != self._begins:
            return special.end()
        marker = self._literal_end(asked)
        if not marker or not text.startswith(marker, content_end):
            raise NotFound("the chat template puts no end-of-turn token after an answer")
        return content_end + len(marker)

    def _literal_end(self, asked: Asked) -> str:
        """Returns the text that follows an answer both at the end and before another turn, e.g. ``</s>``."""
        last = str(self.scaffold(("user", "assistant"), asked).pieces[-1])
        longer = self.scaffold(("user", "assistant") * 2, asked).pieces
        middle = str(longer[longer.index(1) + 1])
        same = takewhile(lambda pair: pair[0] == pair[1], zip(last, middle, strict=False))
        return "".join(one for one, _ in same).rstrip()
