"""Generation as its definition reads: one token at a time, the whole text scanned after each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aquiline.sampling import SamplingParams, TokenChooser


@dataclass
class SlowOutput:
    """Attributes as in `GenerationOutput`; `endless` is how the text would continue without an end."""

    token_ids: list[int]
    text: str
    finish_reason: str
    endless: list[int]


def certain_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of `tokens` that no later token can change."""
    # Not `all_special_ids`: that names only tokens with a role, and decoding skips all special ones.
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    tokens = [t for t in tokens if t not in special]
    while tokens and tokenizer.convert_ids_to_tokens(tokens[-1]).startswith("<0x"):
        tokens.pop()
    return decode(tokenizer, tokens).rstrip("\ufffd")


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def completed_at(text: str, before: int, stops: Sequence[str]) -> int | None:
    """Earliest start of a stop string in `text` that ends after its first `before` characters."""
    starts = [
        start
        for stop in stops
        for start in range(len(text) - len(stop) + 1)
        if text[start : start + len(stop)] == stop and start + len(stop) > before
    ]
    return min(starts, default=None)


def slow_generate(
    logits_after: Callable[[Sequence[int]], Tensor],
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    max_positions: int,
    end_ids: Sequence[int] = (),
    tokenizer: Any = None,
) -> SlowOutput:
    """Returns the output that every engine must give for a request.

    Args:
        logits_after: text → (V,) logits of the next token.
        prompt: ids.
        params: settings.
        seed: resolved seed.
        max_positions: context length.
        end_ids: the model's end tokens.
        tokenizer: for text and stop strings.
    """
    ends = {} if params.ignore_eos else dict.fromkeys(end_ids, "eos")
    ends = dict.fromkeys(params.stop_token_ids, "stop") | ends
    chooser = TokenChooser(params, seed, len(prompt), tuple(ends))
    budget = min(params.max_new_tokens, max_positions - len(prompt))
    tokens = list(prompt)
    for _ in range(budget + 8):
        tokens.append(chooser(logits_after(tokens), tokens))
    endless = tokens[len(prompt) :]
    before = 0  # characters of the text in which stop strings were looked for
    for count in range(1, budget + 1):
        emitted = endless[:count]
        if emitted[-1] in ends and count > params.min_new_tokens:
            return SlowOutput(emitted, *_end(tokenizer, emitted[:-1], before, params, ends[emitted[-1]]), endless)
        if tokenizer is None:
            continue
        text = certain_text(tokenizer, emitted)
        start = completed_at(text, before, params.stop) if count >= params.min_new_tokens else None
        if start is not None:
            return SlowOutput(emitted, text[:start], "stop", endless)
        before = len(text)
    emitted = endless[:budget]
    return SlowOutput(emitted, *_end(tokenizer, emitted, before, params, "length"), endless)


def _end(tokenizer: Any, shown: list[int], before: int, params: SamplingParams, reason: str) -> tuple[str, str]:
    """The output ends here, so all of its text is certain; a stop string may be complete only now."""
    if tokenizer is None:
        return "", reason
    text = decode(tokenizer, shown)
    start = completed_at(text, before, params.stop)
    return (text, reason) if start is None else (text[:start], "stop")
