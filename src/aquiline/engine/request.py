"""Defines the records of a generation (engine, request, events, output), and checks requests."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from aquiline.checks import check_kind, check_value, integer
from aquiline.drafters.drafter import Drafter, Drafting
from aquiline.engine.text import EMPTY_PROMPT
from aquiline.engine.watch import Watch
from aquiline.sampling import LogitsProcessor, LossyRule, SamplingParams, check_lossy
from aquiline.stats import GenerationStats
from aquiline.targets.target import Target


@dataclass(frozen=True, eq=False)
class Engine:
    """A target, its drafter and tokenizer, shared by all requests. Holds no request's state.

    Any number of streams may run on one engine, interleaved or from several threads: each has
    its own cache, and the lock is held for one unit of work at a time (a chunk of a prefill or
    a step). Like any generator, a stream belongs to one thread at a time.

    Attributes:
        drafter: the drafter, or None for plain decoding.
        tokenizer: a Hugging Face tokenizer, or None to work with token ids only.
        end_ids: the model's end-of-sequence tokens.
        lossy: an acceptance rule that changes the output distribution.
        max_rows: requests that decode at once in one call, ≥ 1; the others wait for a slot.
        lock: held while the target or the drafter works.
        process: id of the process that loaded the weights, the only one that may use them.
        watch: acceptance of all requests, and alarms if it falls.
    """

    target: Target
    drafter: Drafter | None
    tokenizer: Any | None
    end_ids: tuple[int, ...]
    lossy: LossyRule | None = None
    max_rows: int = 16
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    process: int = field(default_factory=os.getpid, repr=False)
    watch: Watch = field(default_factory=Watch, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_rows", integer("max_rows", self.max_rows, 1))
        _check_ids("the model's end-of-sequence tokens (eos_token_id) have", self.end_ids, self.target.shape.vocab_size)


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt and its settings.

    Attributes:
        tokens: the prompt, at least one token id.
        params: settings; the request produces `params.n` outputs.
        drafting: settings that change its speed alone.
        provenance: report what drafted each piece of text, in `StreamEvent.pieces`.
    """

    tokens: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    drafting: Drafting = field(default_factory=Drafting)
    provenance: bool = False


@dataclass(frozen=True, eq=False)
class GenerationOutput:
    """A finished output.

    Attributes:
        prompt_tokens: ids of the prompt.
        token_ids: emitted ids, including the token that ended the output (an end-of-sequence token,
            one of `stop_token_ids`, or the token that completed a stop string).
        text: the text of `token_ids` without special tokens, cut before the end token or stop
            string; empty for an engine without a tokenizer.
        finish_reason: "eos" (one of the model's end-of-sequence tokens), "stop" (a stop string or
            one of `stop_token_ids`), "length" (max_new_tokens or the context is exhausted) or "error".
        stats: counters of this output; `seconds` are those of the batch while it held a slot.
        seed: seed of its draws; repeats the output for the same prompt and settings.
        logprobs: log-probability of each of `token_ids`, if requested.
        top_logprobs: per token, id → log-probability of the likeliest ids, if requested.
        error: what ended this output alone, after its last token: a logits processor that raised, or
            logits that leave nothing to choose.
    """

    prompt_tokens: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stats: GenerationStats
    seed: int
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    error: Exception | None = None


@dataclass(frozen=True, eq=False)
class Piece:
    """A token's text and where the token came from.

    Attributes:
        text: what the token completes; empty for a part of a character and for an end token.
        token_ids: the token; empty if an earlier piece has the beginning of its text.
        source: what drafted it ("head", "lookup", "prediction", …), or "target".
        step: target forward that emitted it, counted from 0, the prompt's.
    """

    text: str
    token_ids: list[int]
    source: str
    step: int


@dataclass(frozen=True, eq=False)
class StreamEvent:
    """The tokens and text that one step added to one output.

    Attributes:
        index: index of the request in its call.
        token_ids: newly emitted ids.
        text: newly emitted text; never ends inside a character or a possible stop string. The
            texts of an output's events join to `GenerationOutput.text`.
        finish_reason: set in the last event of an output.
        output: the whole output, in its last event.
        sample: index among the request's n outputs.
        logprobs: log-probability of each of `token_ids`, if requested.
        top_logprobs: per token, id → log-probability of the likeliest ids, if requested.
        pieces: `text` by its origin, if requested.
        error: what ended this output alone: a logits processor that raised, or memory that ran out.
            It is the output's last event.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    output: GenerationOutput | None = None
    sample: int = 0
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    pieces: list[Piece] | None = None
    error: Exception | None = None


@runtime_checkable
class RequestProcessor(Protocol):
    """An entry of `SamplingParams.logits_processors` that creates a new processor for each output.

    For stateful processors, such as a grammar.
    """

    def for_request(self, prompt_length: int) -> LogitsProcessor:
        """Creates the processor for an output whose prompt has `prompt_length` tokens."""
        ...


def check(engine: Engine, request: Request, index: int = 0, count: int = 1) -> None:
    """Rejects a request that cannot run, before any work.

    Args:
        count: number of requests in the call; above 1, errors name the request.

    Raises:
        ValueError: with the value, what is allowed, and the remedy.
    """
    check_process(engine)
    _check_params(engine, request.params)
    _check_drafting(engine, request.drafting)
    with naming_prompt(index, count):
        _check_prompt(engine, request)


def _check_prompt(engine: Engine, request: Request) -> None:
    tokens, params, context = request.tokens, request.params, engine.target.shape.max_positions
    if not tokens:
        raise ValueError(EMPTY_PROMPT)
    _check_ids("the prompt has", tokens, engine.target.shape.vocab_size)
    least = max(1, params.min_new_tokens) if params.max_new_tokens else 0
    if len(tokens) + least > context:
        raise ValueError(
            f"a prompt of {len(tokens)} tokens leaves no room for {least} new ones: this model's context is {context}; "
            f"shorten the prompt to {context - least} tokens, or extend the context with rope scaling of type yarn or "
            "linear in its config.json"
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
        raise ValueError("stop strings need a tokenizer, which this engine lacks; use stop_token_ids")
    special = special_tokens(engine.tokenizer) if params.stop and params.skip_special_tokens else {}
    for stop in params.stop:
        inside = next((text for text in special if len(text) > 1 and text in stop and text != stop), None)
        if inside is not None:
            raise ValueError(
                f"stop has {stop!r}, but {inside!r} in it is a special token, which has no text in an output; "
                f"allowed: the token alone, or stop_token_ids=({special[inside]},)"
            )
    if engine.lossy is not None:
        check_lossy(engine.lossy, params.temperature)


def _check_drafting(engine: Engine, drafting: Drafting) -> None:
    for name in ("depth", "nodes"):
        value = getattr(drafting, name)
        check_value(f"drafting: {name}", value, value is None or value >= 1, "an integer ≥ 1, or None")
    needs = None if engine.drafter is None else engine.drafter.needs
    if not drafting.usual and needs is not None and (needs.every_step or needs.samples):
        name = type(engine.drafter).__name__
        raise ValueError(f"{name} drafts for all rows of a batch alike; drop the request's own drafting settings")


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Special tokens, which have no text in an output: how they are written → id."""
    return {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def check_process(engine: Engine) -> None:
    """Raises RuntimeError in a process that was forked after the engine was made.

    The threads of OpenMP and CUDA do not survive a fork: the first parallel product would wait for ever.
    """
    if os.getpid() != engine.process:
        raise RuntimeError(
            f"this process ({os.getpid()}) was forked from the one that loaded the model ({engine.process}), whose "
            "threads it lacks; call load() in the child, or start it with multiprocessing's 'spawn' method"
        )


@contextmanager
def naming_prompt(index: int, count: int) -> Iterator[None]:
    """Prefixes errors with the prompt's number, if there are several prompts."""
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
    """Applies `settings` on top of `params`, or of `defaults` if `params` is None.

    Raises:
        TypeError: for an unknown setting, or `params` of the wrong type.
    """
    known = SamplingParams.__dataclass_fields__
    unknown = sorted(settings.keys() - known.keys())
    if unknown:
        raise TypeError(f"unknown setting {unknown[0]!r}; allowed: {', '.join(known)}")
    good = isinstance(params, SamplingParams | None)
    check_kind("params", params, good, "SamplingParams or None; pass single settings by name")
    return replace(defaults if params is None else params, **settings)
