"""Small tokenizers with every difficulty of large ones, built in memory."""

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = "<eos>"
CHAT = """\
{%- for turn in messages -%}{{- '<turn>' + turn.role + ': ' + turn.content + '<eos>' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<turn>assistant: ' -}}{%- endif -%}"""

PIECES = (
    *(bytes([byte]) for byte in b"abcdefg .!?"),
    *(b"ab", b"ba", b"abc", b"aab", b" a", b" the", b"\n\n", b"!?", b"bab"),
    *(bytes([byte]) for byte in "é€😀".encode()),
    *(b"a\xc3", b"\xa9b", b"\xe2\x82", b"\xff", b"\x80\x80"),
)
"""Tokens of `byte_level`: letters, longer pieces, and bytes that make characters only together."""


def _byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


@cache
def byte_level() -> Any:
    """A byte-level tokenizer of about 40 tokens; ids 0 and 1 are special, the first one is EOS."""
    characters = _byte_characters()
    names = ["".join(characters[byte] for byte in piece) for piece in PIECES]
    vocabulary = {name: i + 2 for i, name in enumerate(dict.fromkeys(names))}
    return _finish(Tokenizer(models.BPE(vocab={EOS: 0, "<turn>": 1} | vocabulary, merges=[])), decoders.ByteLevel())


@cache
def every_byte() -> Any:
    """A byte-level tokenizer that encodes every text, one token a byte; EOS is 0."""
    vocabulary = {character: i + 2 for i, character in enumerate(_byte_characters().values())}
    return _finish(Tokenizer(models.BPE(vocab={EOS: 0, "<turn>": 1} | vocabulary, merges=[])), decoders.ByteLevel())


@cache
def byte_fallback() -> Any:
    """A tokenizer in the style of Llama 2: words begin with ▁, unknown characters are bytes."""
    words = ["▁", "▁a", "▁the", "a", "b", "ab", "é", ".", "▁▁", "\n"]
    names = [EOS, "<turn>", *words, *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True)
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finish(Tokenizer(model), decoder)


def _finish(tokenizer: Tokenizer, decoder: Any) -> Any:
    if isinstance(decoder, decoders.ByteLevel):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (EOS, "<turn>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, chat_template=CHAT)
