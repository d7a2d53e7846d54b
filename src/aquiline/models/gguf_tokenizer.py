"""Builds a `tokenizers.Tokenizer` from a GGUF header."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from aquiline.models.gguf_header import GgufHeader

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# How byte-level models split a text before merging, by `tokenizer.ggml.pre`: Llama 3 splits numbers
# into groups of three digits, Qwen into single digits; the rest is shared.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_DIGITS_TOGETHER = {**dict.fromkeys(_LLAMA3, "{1,3}"), "qwen2": ""}


def special_tokens(header: GgufHeader) -> dict[str, str]:
    """Returns the file's begin, end, unknown and padding tokens by their Hugging Face role."""
    tokens = header.array("tokenizer.ggml.tokens")
    ids = {role: header.scalars.get(f"tokenizer.ggml.{kind}_token_id") for kind, role in _ROLES.items()}
    return {role: tokens[number] for role, number in ids.items() if number is not None and number < len(tokens)}


def tokenizer_from_gguf(header: GgufHeader, special: Mapping[str, str]) -> "Tokenizer":
    """Builds the tokenizer of a GGUF file.

    Byte-level vocabularies (``tokenizer.ggml.model`` = ``gpt2``) are built here with the splitter
    named in the file: transformers' loader ignores the name, and some versions add tokens.
    Sentencepiece vocabularies and unknown splitters use that loader.

    Returns:
        A tokenizer that adds begin and end tokens where llama.cpp does.
    """
    from tokenizers import processors

    tokenizer = _byte_level(header) if header.scalars.get("tokenizer.ggml.model") == "gpt2" else _loaded(header)
    frame = ["$A"]
    # Unless the file says otherwise, these start a text with the begin token.
    begins = header.scalars.get("tokenizer.ggml.model") == "llama" or _splitter_name(header) in _LLAMA3
    if header.scalars.get("tokenizer.ggml.add_bos_token", begins) and "bos_token" in special:
        frame.insert(0, special["bos_token"])
    if header.scalars.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in special:
        frame.append(special["eos_token"])
    ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(frame) if token != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(single=frame, special_tokens=ids)
    return tokenizer


def _byte_level(header: GgufHeader) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = _splitter_name(header)
    tokens = header.array("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in header.array("tokenizer.ggml.merges")]
    # Llama 3 keeps a word that is in the vocabulary whole, even if no merges produce it.
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in _LLAMA3))
    tokenizer.decoder = decoders.ByteLevel()
    if name == "smollm":
        # Split off each digit first; this also determines how spaces before a number are merged.
        digits = pre_tokenizers.Digits(individual_digits=True)
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    elif name in _DIGITS_TOGETHER:
        split = pre_tokenizers.Split(Regex(_SPLIT % _DIGITS_TOGETHER[name]), behavior="isolated")
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, rest])
        if name == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
    else:
        loaded = _loaded(header)
        tokenizer.normalizer, tokenizer.pre_tokenizer = loaded.normalizer, loaded.pre_tokenizer
    tokenizer.add_tokens(list(_added_tokens(header, tokens)))
    return tokenizer


def _added_tokens(header: GgufHeader, tokens: list[str]) -> Iterator[Any]:
    """Yields the tokens that are matched before a text is split."""
    from gguf import TokenType
    from tokenizers import AddedToken

    for token, kind in zip(tokens, header.array("tokenizer.ggml.token_type"), strict=False):
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            yield AddedToken(token, normalized=False, special=kind == TokenType.CONTROL)


def _loaded(header: GgufHeader) -> "Tokenizer":
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(header.path.parent), gguf_file=header.path.name)
    return Tokenizer.from_str(loaded.backend_tokenizer.to_str())


def _splitter_name(header: GgufHeader) -> str:
    return str(header.scalars.get("tokenizer.ggml.pre", ""))
