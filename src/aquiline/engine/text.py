"""Converts prompts to tokens, and tokens back to text piece by piece."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""A text, chat messages ({"role": …, "content": …}), or token ids."""

EMPTY_PROMPT = "the prompt is empty; give at least one token (for an unprompted text the model's BOS token)"

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes tokens incrementally; the pieces join to the tokenizer's own decoding.

    Special tokens have no text. Decoding works on a short window: the tokens since the text last
    ended in a whole character, preceded by the tokens before that point as context, because some
    decoders treat the first token of a text differently. Characters that later tokens may still
    change are held back: the bytes of an incomplete UTF-8 character, and runs of byte-fallback
    tokens, which decode only as a whole.

    Args:
        tokenizer: a Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._bytes = _byte_fallback_ids(tokenizer)
        self._context: list[int] = []
        self._pending: list[int] = []
        self._released = 0  # characters of the window's text already returned

    def add(self, token: int) -> None:
        """Appends the next token."""
        if token not in self._special:
            self._pending.append(token)

    def release(self) -> str:
        """Returns the new text that no later token can change."""
        ready = len(self._pending)
        while ready and self._pending[ready - 1] in self._bytes:
            ready -= 1
        if not ready:
            return ""
        window = self._context + self._pending[:ready]
        text = self._decode(window)
        stable = text.rstrip(_REPLACEMENT)
        piece = stable[self._released :]
        self._released = max(self._released, len(stable))
        if text and stable == text:
            alone = self._decode(self._pending[:ready])
            self._context, self._released = (self._pending[:ready], len(alone)) if alone else (window, self._released)
            del self._pending[:ready]
        return piece

    def finish(self) -> str:
        """Returns the rest of the text; incomplete characters become replacement characters."""
        piece = self._decode(self._context + self._pending)[self._released :] if self._pending else ""
        self._pending.clear()
        return piece

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _byte_fallback_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens <0x00> … <0xFF>; empty if the tokenizer lacks them."""
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    # A missing token gives None or the unknown token's id.
    return frozenset(ids) if None not in ids and len(set(ids)) == 256 else frozenset()


def encode_prompt(tokenizer: Any | None, prompt: Prompt, *, raw: bool = False) -> list[int]:
    """Converts a prompt to token ids; `aquiline.engine.request.check` compares them with the vocabulary.

    Text becomes one user message in the chat template, if the tokenizer has one; with `raw` it is
    tokenized without the template, and with the tokenizer's own special tokens. Messages go
    through the chat template, followed by the start of an answer; the template writes the
    beginning-of-sequence token itself, so none is added. Token ids are used unchanged.

    Args:
        tokenizer: a Hugging Face tokenizer, or None if prompts are token ids.
        prompt: the prompt.
        raw: do not apply the chat template to text.

    Raises:
        ValueError: for an empty prompt, or a missing tokenizer or chat template.
        TypeError: for a prompt of the wrong type.
    """
    if not isinstance(prompt, str | Sequence) or isinstance(prompt, bytes | bytearray):
        raise TypeError(f"a prompt is a text, a list of messages or a list of token ids, not {type(prompt).__name__}")
    if not prompt:
        raise ValueError(EMPTY_PROMPT)
    if isinstance(prompt, str):
        return _encode_text(tokenizer, prompt, raw)
    if any(isinstance(part, Mapping) for part in prompt):
        return _tokenize(tokenizer, render(tokenizer, prompt), special=False)  # type: ignore[arg-type]
    return [_token_id(part) for part in prompt]


def render(tokenizer: Any | None, messages: Sequence[Mapping[str, Any]]) -> str:
    """Renders messages with the model's chat template, up to the start of the next answer.

    Raises:
        ValueError: without a chat template, or if the template rejects the messages.
    """
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat messages need a tokenizer with a chat template; pass a text with raw=True, or token ids")
    assert tokenizer is not None
    try:
        texts = [_checked(message) for message in messages]
        text: str = tokenizer.apply_chat_template(texts, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(f"the chat template rejects the messages: {error}") from error
    return text


def _checked(message: Any) -> Mapping[str, Any]:
    """Returns the message with its content as one text, the form that templates of text models expect."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TypeError(f"{message!r} is not a message; allowed: {{'role': …, 'content': …}} with a text as the role")
    content = message.get("content")
    if isinstance(content, str | None):  # the template decides how to render None
        return message
    if not isinstance(content, list):
        raise TypeError(f"a message has content {content!r}; allowed: a text, or a list of parts of type 'text'")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"a message has content of type {kind!r}; allowed: text (this is a text model)")
    return {**message, "content": "".join(part["text"] for part in content)}


def _encode_text(tokenizer: Any | None, prompt: str, raw: bool) -> list[int]:
    if raw or not getattr(tokenizer, "chat_template", None):
        return _tokenize(tokenizer, prompt, special=True)
    return _tokenize(tokenizer, render(tokenizer, [{"role": "user", "content": prompt}]), special=False)


def _tokenize(tokenizer: Any | None, text: str, special: bool) -> list[int]:
    if tokenizer is None:
        raise ValueError("this engine has no tokenizer; pass the prompt as token ids")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = text[max(0, error.start - 10) : error.end]
        raise ValueError(f"the prompt is not valid Unicode at {place!r}; pass it as UTF-8") from error
    tokens: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    return tokens


def _token_id(part: object) -> int:
    try:
        if isinstance(part, bool):
            raise TypeError
        return operator.index(part)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"{part!r} in the prompt is neither a message nor a token id; "
            "give a text, a list of {'role', 'content'} messages, or a list of integers"
        ) from None


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of equal tokens at the beginning of both."""
    size = min(len(first), len(second))
    if first[:size] == second[:size]:
        return size
    return next((i for i in range(size) if first[i] != second[i]), size)
