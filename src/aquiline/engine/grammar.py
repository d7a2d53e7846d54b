"""Grammar-constrained decoding: JSON schemas, regular expressions and grammars, through llguidance.

A grammar is an ordinary logits processor: it runs on visited nodes only, with that node's own
text, so speculative decoding stays exact::

    from aquiline.engine.grammar import json_schema

    loaded.generate(prompt, logits_processors=(json_schema(loaded.engine, schema),))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aquiline.checks import check_kind
from aquiline.engine.request import Engine
from aquiline.engine.text import common_prefix


class Grammar:
    """A valid grammar, created by the functions below; each output gets its own `GrammarProcessor`.

    Args:
        source: the grammar in llguidance's format.
        end_ids: tokens that may end a text accepted by the grammar.
    """

    def __init__(self, tokenizer: Any, source: str, end_ids: Sequence[int]) -> None:
        self.tokenizer, self.source, self.end_ids = tokenizer, source, tuple(end_ids)

    def for_request(self, prompt_length: int) -> GrammarProcessor:
        from llguidance import LLMatcher

        return GrammarProcessor(LLMatcher(self.tokenizer, self.source), prompt_length, self.end_ids)


class GrammarProcessor:
    """Bars every token that the grammar does not allow after the output so far.

    The matcher follows the texts of the visited nodes: it rolls back to the common prefix of the
    previous and the current text, and continues from there.

    Args:
        matcher: an `LLMatcher` at the start of its grammar.
        prompt_length: prompt tokens, which the grammar ignores.
        end_ids: the only tokens allowed after a text that the grammar rejects.
    """

    def __init__(self, matcher: Any, prompt_length: int, end_ids: Sequence[int]) -> None:
        self._matcher, self._prompt_length, self._end_ids = matcher, prompt_length, list(end_ids)
        self._read: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Hugging Face's form: (1, S) ids and (1, V) scores → (1, V)."""
        allowed = self._allowed(input_ids[0, self._prompt_length :].tolist(), scores.shape[-1]).to(scores.device)
        barred = scores.masked_fill(~allowed, -torch.inf)
        if torch.isneginf(barred).all():
            # Another setting bars every token that the grammar allows: the grammar takes precedence.
            return torch.zeros_like(scores).masked_fill(~allowed, -torch.inf)
        return barred

    def _allowed(self, output: list[int], vocabulary: int) -> Tensor:
        """Returns (V,) bool: the tokens that may follow `output`."""
        allowed = torch.zeros(vocabulary, dtype=torch.bool)
        if not self._follow(output):
            allowed[self._end_ids] = True
            return allowed
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed[: len(bits)] = torch.from_numpy(bits[:vocabulary].astype(bool))
        return allowed

    def _follow(self, output: list[int]) -> bool:
        """Advances the matcher to the end of `output`; False if the grammar rejects it or has ended."""
        size = common_prefix(output, self._read)
        if size < len(self._read):
            self._matcher.rollback(len(self._read) - size)
            del self._read[size:]
        self._read += output[size : size + self._matcher.try_consume_tokens(output[size:])]
        return len(self._read) == len(output)


def json_schema(engine: Engine, schema: str | Mapping[str, Any]) -> Grammar:
    """Constrains the output to JSON that matches a schema.

    Args:
        engine: provides the tokenizer and end tokens.
        schema: a JSON schema, as text or as a mapping; {} allows any JSON.

    Raises:
        ValueError: if the schema is invalid, or uses features that llguidance does not support.
        ImportError: if llguidance is not installed.
    """
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"the schema is not JSON ({reason}); allowed: values that json.dumps accepts") from error
    return _grammar(engine, "grammar_from_json_schema", text)


def regex(engine: Engine, pattern: str) -> Grammar:
    """Constrains the whole output to a regular expression (Rust's syntax, no look-around); see `json_schema`."""
    return _grammar(engine, "grammar_from_regex", pattern)


def lark(engine: Engine, source: str) -> Grammar:
    """Constrains the output to a context-free grammar in Lark's notation; see `json_schema`."""
    return _grammar(engine, "grammar_from_lark", source)


def _grammar(engine: Engine, kind: str, source: str) -> Grammar:
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise ImportError("grammars need llguidance; install it with: pip install 'aquiline[grammar]'") from error
    if not isinstance(engine, Engine):
        raise TypeError(f"engine is a {type(engine).__name__}; allowed: an Engine (loaded.engine)")
    check_kind("a grammar's source", source, isinstance(source, str), "a text")
    if engine.tokenizer is None:
        raise ValueError("a grammar needs a tokenizer, which this engine lacks; pass one to load()")
    if not engine.end_ids:
        raise ValueError(
            "a grammar needs an end-of-sequence token, which this engine lacks; allowed: an engine with end_ids"
        )
    try:
        grammar = getattr(LLMatcher, kind)(source)
        tokenizer = _tokenizer(engine.tokenizer, engine.end_ids, engine.target.shape.vocab_size)
        problem = LLMatcher.validate_grammar(grammar, tokenizer)
    except (ValueError, RuntimeError) as error:
        problem = str(error)
    if problem:
        raise ValueError(f"the grammar {source[:200]!r} cannot be used: {problem}")
    return Grammar(tokenizer, grammar, engine.end_ids)


@lru_cache(maxsize=4)
def _tokenizer(tokenizer: Any, end_ids: tuple[int, ...], vocabulary: int) -> Any:
    """llguidance's copy of a tokenizer; building a large one takes about a second."""
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=max(vocabulary, len(tokenizer)), eos_token=list(end_ids))
