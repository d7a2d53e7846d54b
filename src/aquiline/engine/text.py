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

    Special tokens have no text, unless they are kept. Decoding works on a short window: the tokens since the text last
    ended in a whole character, preceded by the tokens before that point as context, because some
    decoders treat the first token of a text differently. Characters that later tokens may still
    change are held back: the bytes of an incomplete UTF-8 character, and runs of byte-fallback
    tokens, which decode only as a whole.
    """

    def __init__(self, tokenizer: Any, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = special if skip_special else set()
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
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False
        )
        return text


def _byte_fallback_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens <0x00> … <0xFF>; empty if the tokenizer lacks them."""
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    # A missing token gives None or the unknown token's id.
    return frozenset(ids) if None not in ids and len(set(ids)) == 256 else frozenset()


def encode_prompt(
    tokenizer: Any | None,
    prompt: Prompt,
    *,
    raw: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Converts a prompt to token ids; `aquiline.engine.request.check` compares them with the vocabulary.

    A text becomes one user message if the tokenizer has a chat template. Without one, or with `raw`, the tokenizer adds
    its own special tokens, but does not double a beginning-of-sequence token in the text. Messages go through the
    template, which writes that token itself, and end with the start of an answer. Token ids (a list, array, tensor or
    `BatchEncoding` of one row) are used unchanged.

    Args:
        tokenizer: a Hugging Face tokenizer, or None if prompts are token ids.
        raw: do not apply the chat template to a text.
        tools, chat_template_kwargs: for the chat template: descriptions of tools, and variables.

    Raises:
        ValueError: for an empty prompt, a missing tokenizer or chat template, or template variables without one.
    """
    prompt = _listed(prompt)
    if not isinstance(prompt, str | Sequence) or isinstance(prompt, bytes | bytearray):
        raise TypeError(f"a prompt is a text, a list of messages or a list of token ids, not {type(prompt).__name__}")
    if not prompt:
        raise ValueError(EMPTY_PROMPT)
    chat = any(isinstance(part, Mapping) for part in prompt) or (
        isinstance(prompt, str) and not raw and getattr(tokenizer, "chat_template", None)
    )
    if not chat and (tools or chat_template_kwargs):
        raise ValueError("tools and chat_template_kwargs need messages, or a text without raw, and a chat template")
    if chat:
        messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = render(tokenizer, messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
        return _tokenize(tokenizer, text, special=False)
    if isinstance(prompt, str):
        return _tokenize(tokenizer, prompt, special=True)
    return [_token_id(part) for part in prompt]


def encode_expected(tokenizer: Any | None, text: str | Sequence[int]) -> list[int]:
    """Converts an expected text to token ids, without special tokens; ids are used unchanged.

    Raises:
        ValueError: for a text without a tokenizer.
        TypeError: for anything else.
    """
    if isinstance(text, str):
        return _tokenize(tokenizer, text, special=False)
    if not isinstance(text, Sequence) or isinstance(text, bytes | bytearray):
        raise TypeError(f"prediction is a {type(text).__name__}; allowed: a text, or a list of token ids")
    return [_token_id(part) for part in text]


def _listed(prompt: Any) -> Any:
    """Returns the token ids of an array, a tensor or a `BatchEncoding`; other prompts unchanged."""
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        prompt = prompt["input_ids"]
    if callable(getattr(prompt, "tolist", None)):
        prompt = prompt.tolist()
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        return prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        raise TypeError(f"a prompt has {len(prompt)} rows of token ids; pass them as a list of prompts (.tolist())")
    return prompt


def render(
    tokenizer: Any | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Renders messages with the model's chat template, up to the start of the next answer.

    Raises:
        ValueError: without a chat template, or if the template rejects the messages; see `apply_template`.
    """
    from aquiline.engine.template import apply_template

    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat messages need a tokenizer with a chat template; pass a text with raw=True, or token ids")
    checked = [_checked(message) for message in messages]
    return apply_template(tokenizer, checked, tools=tools or (), settings=chat_template_kwargs)


def _checked(message: Any) -> Mapping[str, Any]:
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
    return message


def _tokenize(tokenizer: Any | None, text: str, special: bool) -> list[int]:
    if tokenizer is None:
        raise ValueError("this engine has no tokenizer; pass the prompt as token ids")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = text[max(0, error.start - 10) : error.end]
        raise ValueError(f"the prompt is not valid Unicode at {place!r}; pass it as UTF-8") from error
    tokens: list[int] = tokenized(tokenizer, text, add_special_tokens=special)["input_ids"]
    begin = getattr(tokenizer, "bos_token_id", None)
    doubled = special and begin is not None and tokens[:2] == [begin, begin] and text.startswith(tokenizer.bos_token)
    return tokens[1:] if doubled else tokens


def tokenized(tokenizer: Any, text: str | list[str], **options: Any) -> Any:
    """Calls a tokenizer, whose rules are foreign code.

    Raises:
        ValueError: the tokenizer's own code fails, for instance a regular expression that backtracks too long.
    """
    try:
        return tokenizer(text, **options)
    except BaseException as error:  # a panic of the Rust library derives from BaseException
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(
            f"the tokenizer fails on this text ({str(error)[:200]}); shorten it, or repair the patterns in "
            "tokenizer.json"
        ) from error


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
    """Returns the number of equal tokens at the beginning of both."""
    size = min(len(first), len(second))
    if first[:size] == second[:size]:
        return size
    return next((i for i in range(size) if first[i] != second[i]), size)
