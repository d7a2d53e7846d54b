"""What goes into a generation and what comes out."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from aquiline.checks import check_kind, integer
from aquiline.drafters.drafter import Drafter
from aquiline.sampling import LogitsProcessor, SamplingParams
from aquiline.stats import GenerationStats
from aquiline.targets.target import Target
from aquiline.verify import LossyRule


@dataclass(frozen=True, eq=False)
class Engine:
    """A target, its drafter and tokenizer: all that requests share. Holds no request's state.

    Any number of streams may run on one engine, interleaved or from several threads: each has
    its own cache, and the lock is held for one unit of work at a time (a piece of a prefill or
    a step). One stream belongs to one thread at a time, like any generator.

    Attributes:
        target: the target.
        drafter: the drafter, or None for plain decoding.
        tokenizer: a Hugging Face tokenizer, or None where prompts are token ids and outputs too.
        end_ids: the model's end-of-sequence tokens.
        lossy: an acceptance rule that changes the output distribution.
        max_rows: most requests decoded at once in one call, ≥ 1; the others wait for a slot.
        lock: held while the target or the drafter work.
    """

    target: Target
    drafter: Drafter | None
    tokenizer: Any | None
    end_ids: tuple[int, ...]
    lossy: LossyRule | None = None
    max_rows: int = 8
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_rows", integer("max_rows", self.max_rows, 1))
        _check_ids("the model's end-of-sequence tokens (eos_token_id) have", self.end_ids, self.target.shape.vocab_size)


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt and how to continue it.

    Attributes:
        tokens: the prompt, at least one token id.
        params: settings; `params.n` outputs are made.
    """

    tokens: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, eq=False)
class GenerationOutput:
    """A finished output.

    Attributes:
        prompt_tokens: ids of the prompt.
        token_ids: emitted ids. The token that ended the output (an end-of-sequence token, one of
            `stop_token_ids`, the one that completed a stop string) is the last of them.
        text: their text without special tokens, without the token that ended the output, and up
            to the stop string that ended it; empty for an engine without a tokenizer.
        finish_reason: "eos" (one of the model's end-of-sequence tokens), "stop" (a stop string or
            one of `stop_token_ids`) or "length" (max_new_tokens or the context is used up).
        stats: counters of this output; `seconds` are those of the batch while it was in its slot.
        seed: seed of its draws; the same prompt and settings with it give the same output.
        logprobs: log-probability of each of `token_ids` if asked for.
        top_logprobs: per token, id → log-probability of the likeliest ids, if asked for.
    """

    prompt_tokens: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stats: GenerationStats
    seed: int
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None


@dataclass(frozen=True, eq=False)
class StreamEvent:
    """What one request gained in one step.

    Attributes:
        index: of the request.
        token_ids: newly emitted ids.
        text: newly emitted text; never half a character nor a part of what may become a stop
            string. The texts of a request's events join to `GenerationOutput.text`.
        finish_reason: set in the last event of an output.
        output: the whole output, in its last event.
        sample: which of the request's n outputs.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    output: GenerationOutput | None = None
    sample: int = 0


@runtime_checkable
class RequestProcessor(Protocol):
    """In `SamplingParams.logits_processors`, something that makes a processor for each output.

    For processors with a state of their own, such as a grammar.
    """

    def for_request(self, prompt_length: int) -> LogitsProcessor:
        """The processor of one output whose prompt has `prompt_length` tokens."""
        ...


def own_processors(params: SamplingParams, prompt_length: int) -> SamplingParams:
    """`params` with a processor made for this output in place of each `RequestProcessor`."""
    if not any(isinstance(processor, RequestProcessor) for processor in params.logits_processors):
        return params
    made = (p.for_request(prompt_length) if isinstance(p, RequestProcessor) else p for p in params.logits_processors)
    return replace(params, logits_processors=tuple(made))


def check(engine: Engine, request: Request, index: int = 0, count: int = 1) -> None:
    """Refuses what cannot run, before any work.

    Args:
        engine: the engine.
        request: the request.
        index: which one it is.
        count: of so many.

    Raises:
        ValueError: naming the value, what is allowed, and the remedy.
    """
    _check_params(engine, request.params)
    with naming_prompt(index, count):
        _check_prompt(engine, request)


def _check_prompt(engine: Engine, request: Request) -> None:
    tokens, params, context = request.tokens, request.params, engine.target.shape.max_positions
    if not tokens:
        raise ValueError("the prompt is empty; give at least one token (for an unprompted text the model's BOS token)")
    _check_ids("the prompt has", tokens, engine.target.shape.vocab_size)
    least = max(1, params.min_new_tokens) if params.max_new_tokens else 0
    if len(tokens) + least > context:
        raise ValueError(
            f"a prompt of {len(tokens)} tokens leaves no room for {least} new ones: the context of this model is "
            f"{context}; shorten the prompt to {context - least} tokens"
        )


def _check_params(engine: Engine, params: SamplingParams) -> None:
    vocabulary = engine.target.shape.vocab_size
    _check_ids("stop_token_ids has", params.stop_token_ids, vocabulary)
    _check_ids("logit_bias has", params.logit_bias, vocabulary)
    if params.min_new_tokens > params.max_new_tokens:
        raise ValueError(
            f"min_new_tokens is {params.min_new_tokens}; allowed: 0 … max_new_tokens ({params.max_new_tokens})"
        )
    if params.stop and engine.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and this engine has none; use stop_token_ids")
    lossy = engine.lossy is not None and not engine.lossy.exact
    if lossy and params.temperature == 0:
        raise ValueError(
            "temperature is 0: lossy acceptance needs temperature > 0; drop the lossy rule for greedy output"
        )


@contextmanager
def naming_prompt(index: int, count: int) -> Iterator[None]:
    """Of several prompts, says which one an error is about."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if count == 1:
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"prompt {index + 1} of {count}: {error}") from error


def _check_ids(what: str, ids: Any, vocabulary: int) -> None:
    outside = next((token for token in ids if not 0 <= token < vocabulary), None)
    if outside is not None:
        raise ValueError(f"{what} token id {outside}; allowed: 0 … {vocabulary - 1}, the target's vocabulary")


def merged_params(params: SamplingParams | None, defaults: SamplingParams, settings: dict[str, Any]) -> SamplingParams:
    """`params`, or the defaults without any, with single settings on top.

    Raises:
        TypeError: for an unknown setting, or `params` of another kind.
    """
    known = SamplingParams.__dataclass_fields__
    unknown = sorted(settings.keys() - known.keys())
    if unknown:
        raise TypeError(f"unknown setting {unknown[0]!r}; allowed: {', '.join(known)}")
    good = isinstance(params, SamplingParams | None)
    check_kind("params", params, good, "SamplingParams or None; give single settings by name")
    return replace(defaults if params is None else params, **settings)


def fresh_seed() -> int:
    """A seed for a request that named none."""
    return secrets.randbits(48)


def sample_seed(seed: int, sample: int) -> int:
    """Seed of one of a request's n outputs; the first one's is the request's own."""
    if sample == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")
