"""Emits an output in progress: decides how much of each step is reported, and where the output ends."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from aquiline.decode import Occupant
from aquiline.engine.logprobs import token_logprobs
from aquiline.engine.provenance import Provenance
from aquiline.engine.request import (
    Engine,
    GenerationOutput,
    Request,
    RequestProcessor,
    StreamEvent,
    special_tokens,
)
from aquiline.engine.stops import StopScanner
from aquiline.engine.text import Detokenizer
from aquiline.native.race import native_draw
from aquiline.sampling import SamplingParams, TokenChooser
from aquiline.stats import GenerationStats


class Emission:
    """Finds the token that ends the output, and builds the events.

    The loop passes each chosen token to `add`, so that no step goes past the end of the output.

    Args:
        request: a request that passed `check`.
        sample: index among its n outputs.
        seed: the request's seed, already resolved.
    """

    def __init__(self, engine: Engine, request: Request, index: int, sample: int, seed: int) -> None:
        params, prompt = request.params, list(request.tokens)
        self.index, self.sample, self.params = index, sample, params
        self.prompt = prompt
        self.seed = _sample_seed(seed, sample)
        self._ends: dict[int, str] = {} if params.ignore_eos else dict.fromkeys(engine.end_ids, "eos")
        for token in params.stop_token_ids:
            self._ends.setdefault(token, "stop")
        if params.stop:
            special = special_tokens(engine.tokenizer)
            for token in (special[stop] for stop in params.stop if stop in special):
                self._ends[token] = "stop"
        self._budget = min(params.max_new_tokens, engine.target.shape.max_positions - len(prompt))
        self._detokenizer = (
            Detokenizer(engine.tokenizer, params.skip_special_tokens) if engine.tokenizer is not None else None
        )
        self._scanner = StopScanner(params.stop) if params.stop else None
        self._token_ids: list[int] = []
        self._reported = 0  # tokens in events so far
        self._pieces: list[str] = []  # text since the last event
        self._texts: list[str] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[dict[int, float]] = []
        fast = native_draw(engine.target.device) if params.temperature > 0 else None
        chooser = TokenChooser(_own_processors(params, len(prompt)), self.seed, len(prompt), tuple(self._ends), fast)
        stats = GenerationStats(prompt_tokens=len(prompt))
        self.occupant = Occupant(prompt, chooser, stats, request.drafting, self.add)
        self._provenance = Provenance() if request.provenance else None
        self.cached = 0  # prompt tokens that a slot held already
        self.finish_reason: str | None = None if self._budget else "length"
        self.error: Exception | None = None

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self._budget - len(self._token_ids)

    @property
    def sources(self) -> Counter[str]:
        """Emitted tokens by what drafted them."""
        return self.occupant.stats.sources

    @property
    def settled(self) -> bool:
        """True unless a step that has not ended chose tokens already."""
        return self._reported == len(self._token_ids)

    @property
    def wants_logits(self) -> bool:
        """True if log-probabilities were requested."""
        return self.params.logprobs is not None

    def add(self, token: int) -> bool:
        """Adds the next token; True if it ends the output."""
        assert self.finish_reason is None, "no token follows the end of an output"
        self._token_ids.append(token)
        if self._provenance is not None:
            self._provenance.token(token)
        self._judge(token, len(self._token_ids))
        if self.finish_reason is None and self.remaining == 0:
            self._finish("length")
        return self.finish_reason is not None

    def take(
        self, logits: Tensor | None = None, sources: Sequence[str] = (), error: Exception | None = None
    ) -> StreamEvent:
        """Reports the tokens added since the last event.

        Args:
            logits: (≥ new tokens, V), the logits that they were chosen from; needed if `wants_logits`.
            sources: what drafted each token, or "target"; empty: all are the target's.
            error: what ends the output after them, if its own chooser failed.
        """
        new = self._token_ids[self._reported :]
        self._reported = len(self._token_ids)
        named = sources or ["target"] * len(new)
        self.sources.update(named)
        if self._provenance is not None:
            self._provenance.name(named, self.occupant.stats.steps)
        if error is not None:
            self.error = error
            self._finish("error")
        if self._detokenizer is not None and self._scanner is None and not self.finish_reason:
            self._pieces.append(self._decoded(self._detokenizer.release()))
        text = "".join(self._pieces)
        self._pieces.clear()
        if text:
            self._texts.append(text)
        self.occupant.stats.emitted = len(self._token_ids)
        chosen, best = self._scored(new, logits)
        found = None if self._provenance is None else self._provenance.pieces(text, self.finish_reason is not None)
        return StreamEvent(self.index, new, text, self.finish_reason, None, self.sample, chosen, best, found, error)

    def _scored(
        self, tokens: Sequence[int], logits: Tensor | None
    ) -> tuple[list[float] | None, list[dict[int, float]] | None]:
        if not self.wants_logits or not tokens:
            return None, None
        assert logits is not None
        chosen, best = token_logprobs(logits, tokens, self.params.logprobs or 0)
        self._logprobs += chosen
        self._top_logprobs += best
        return chosen, best if self.params.logprobs else None

    def _decoded(self, text: str) -> str:
        if self._provenance is not None:
            self._provenance.decoded(text)
        return text

    def _judge(self, token: int, count: int) -> None:
        """Finishes the output if `token`, the `count`-th, ends it."""
        minimum = self.params.min_new_tokens
        ends = self._ends.get(token) if count > minimum else None
        if ends:
            self._finish(ends)
            return
        if self._detokenizer is None:
            return
        self._detokenizer.add(token)
        if self._scanner is None and self._provenance is None:
            return  # the step's tokens are decoded together
        text = self._decoded(self._detokenizer.release())
        if self._scanner is None:
            self._pieces.append(text)
            return
        piece, stopped = self._scanner.scan(text, armed=count >= minimum)
        self._pieces.append(piece)
        if stopped:
            self.finish_reason = "stop"

    def _finish(self, reason: str) -> None:
        """Ends the output, and releases the held text, which may complete a stop string."""
        self.finish_reason = reason
        if self._detokenizer is None:
            return
        rest = self._decoded(self._detokenizer.finish())
        if self._scanner is None:
            self._pieces.append(rest)
            return
        piece, stopped = self._scanner.scan(rest)
        self._pieces.append(piece if stopped else piece + self._scanner.flush())
        if stopped and reason != "error":
            self.finish_reason = "stop"

    def output(self) -> GenerationOutput:
        """Returns the finished output."""
        assert self.finish_reason is not None
        return GenerationOutput(
            prompt_tokens=list(self.prompt),
            token_ids=self._token_ids,
            text="".join(self._texts),
            finish_reason=self.finish_reason,
            stats=self.occupant.stats,
            seed=self.seed,
            logprobs=self._logprobs if self.wants_logits else None,
            top_logprobs=self._top_logprobs if self.params.logprobs else None,
            error=self.error,
        )


def outputs_of(engine: Engine, request: Request, index: int) -> list[Emission]:
    """Returns the n outputs of a request, before their first token; without a seed, they share a fresh one."""
    seed = secrets.randbits(48) if request.params.seed is None else request.params.seed
    return [Emission(engine, request, index, sample, seed) for sample in range(request.params.n)]


def _sample_seed(seed: int, sample: int) -> int:
    """Derives the seed of one of n outputs; the first uses the request's own."""
    if sample == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def _own_processors(params: SamplingParams, prompt_length: int) -> SamplingParams:
    """Replaces each `RequestProcessor` in `params` by a processor created for this output."""
    if not any(isinstance(processor, RequestProcessor) for processor in params.logits_processors):
        return params
    made = (p.for_request(prompt_length) if isinstance(p, RequestProcessor) else p for p in params.logits_processors)
    return replace(params, logits_processors=tuple(made))
