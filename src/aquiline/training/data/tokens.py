"""The target's tokenizer in training: loads and identifies it, and tokenises texts no further than needed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from aquiline.engine.text import tokenized
from aquiline.models.files import read_json
from aquiline.training.data.dataset import TokenisedConversation
from aquiline.training.data.masks import Rendered

Encoded: TypeAlias = "tuple[Sequence[int], Sequence[tuple[int, int]]]"
"""Ids of a text, and the half-open character range of each."""

CHARACTERS_PER_TOKEN = 16
"""A text with more characters per token of `max_length` is cut before it is tokenised."""


def load_tokenizer(path: str | Path) -> Any:
    """Loads a target's fast tokenizer from its folder.

    Raises:
        ValueError: if there is none, or it does not provide character offsets.
    """
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        raise ValueError(f"{path} is not a folder; give the folder of the target's tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer could be loaded from {path}: {error}") from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer in {path} is a slow one without character offsets; allowed: fast tokenizers; "
            "add its tokenizer.json"
        )
    return tokenizer


def tokenizer_hash(tokenizer: Any) -> str:
    """Returns the SHA-256 (hex) of a tokenizer's token-to-id table, including added tokens.

    Equal hashes mean that ids are interchangeable; files, versions and templates may differ.
    """
    table = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()


def known_ids(target: Path) -> int | None:
    """Returns how many tokens the target knows, or None without its config."""
    if not (target / "config.json").is_file():
        return None
    config = read_json(target / "config.json")
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def encode_all(tokenizer: Any, texts: Sequence[str], length: int) -> list[Encoded | str]:
    """Tokenises texts in one call.

    Args:
        tokenizer: a fast tokenizer.
        texts: the texts.
        length: tokens needed of each; a longer text may give only its first `length` + 1 tokens or more.

    Returns:
        For each text its ids and offsets, or why the tokenizer fails on it.
    """
    short = [text for text in texts if len(text) <= length * CHARACTERS_PER_TOKEN]
    try:
        together = iter(_encode(tokenizer, short) if short else [])
        return [
            next(together) if len(text) <= length * CHARACTERS_PER_TOKEN else _encode_beginning(tokenizer, text, length)
            for text in texts
        ]
    except ValueError as error:
        if len(texts) == 1:
            return [str(error)]
        return [encode_all(tokenizer, [text], length)[0] for text in texts]


def _encode(tokenizer: Any, texts: list[str]) -> list[Encoded]:
    encoded = tokenized(tokenizer, texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))


def _encode_beginning(tokenizer: Any, text: str, length: int) -> Encoded:
    """Tokenises only so much of a long text that its first `length` + 1 tokens are those of the whole text.

    A cut changes the tokens of the word that it splits, so they must end before that word.
    """
    size = length * CHARACTERS_PER_TOKEN
    while size < len(text):
        part = text[:size]
        ids, offsets = _encode(tokenizer, [part])[0]
        word = max(part.rfind(" "), part.rfind("\n"))
        if len(ids) > length and offsets[length][1] <= word:
            return ids, offsets
        size *= 4
    return _encode(tokenizer, [text])[0]


def check_ids(example: TokenisedConversation, tokenizer: Any, vocabulary: int | None) -> None:
    """Rejects ids that the target does not know.

    Raises:
        ValueError: naming the first example's largest id, its token and the remedy.
    """
    largest = int(example.input_ids.max())
    if vocabulary is not None and largest >= vocabulary:
        raise ValueError(
            f"{example.source}: the tokenizer gives {tokenizer.convert_ids_to_tokens(largest)!r} the id {largest}, and "
            f"the target knows ids below {vocabulary} (vocab_size in config.json); resize the target's embeddings, or "
            "use the tokenizer it was trained with"
        )


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
