"""An output in progress: how much of each step is emitted, and where the output ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aquiline.decode import Occupant
from aquiline.engine.logprobs import token_logprobs
from aquiline.engine.provenance import Provenance
from aquiline.engine.request import Engine, GenerationOutput, Request, StreamEvent, own_processors, sample_seed
from aquiline.engine.stops import StopScanner
from aquiline.engine.text import Detokenizer
from aquiline.sampling import TokenChooser
from aquiline.stats import GenerationStats


@dataclass(frozen=True, eq=False)
class _Guarded(TokenChooser):
    """Keeps a failure to the request that causes it: another row's step goes through.

    Attributes:
        failures: what a processor or an impossible choice raised; the tokens from then on are void.
    """

    failures: list[Exception] = field(default_factory=list)

    def probabilities(self, logits: Tensor, prefix: Sequence[int]) -> Tensor:
        try:
            return super().probabilities(logits, prefix)
        except Exception as error:  # noqa: BLE001 - a user's processor may raise anything
            self.failures.append(error)
            return torch.zeros_like(logits).index_fill_(0, torch.tensor([0], device=logits.device), 1)

    def __call__(self, logits: Tensor, prefix: Sequence[int]) -> int:
        try:
            return super().__call__(logits, prefix)
        except Exception as error:  # noqa: BLE001 - a user's processor may raise anything
            self.failures.append(error)
            return 0


class Emission:
    """Cuts the tokens of each step at the first stop or the budget, and builds the events.

    Args:
        engine: decodes the request.
        request: a request that passed `check`.
        index: its index in the call.
        sample: index among its n outputs.
        seed: the request's seed, already resolved.
    """

    def __init__(self, engine: Engine, request: Request, index: int, sample: int, seed: int) -> None:
        params, prompt = request.params, list(request.tokens)
        self.index, self.sample, self.params = index, sample, params
        self.prompt = prompt
        self.seed = sample_seed(seed, sample)
        self._ends: dict[int, str] = {} if params.ignore_eos else dict.fromkeys(engine.end_ids, "eos")
        for token in params.stop_token_ids:
            self._ends.setdefault(token, "stop")
        self._context = engine.target.shape.max_positions
        self._budget = min(params.max_new_tokens, self._context - len(prompt))
        self._detokenizer = Detokenizer(engine.tokenizer) if engine.tokenizer is not None else None
        self._scanner = StopScanner(params.stop) if params.stop else None
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[dict[int, float]] = []
        self._chooser = _Guarded(own_processors(params, len(prompt)), self.seed, len(prompt), tuple(self._ends))
        self.occupant = Occupant(prompt, self._chooser, GenerationStats(prompt_tokens=len(prompt)), request.drafting)
        self._provenance = Provenance() if request.provenance else None
        self.cached = 0  # prompt tokens that a slot held already
        self.sources: Counter[str] = Counter()  # emitted tokens by what drafted them
        self.finish_reason: str | None = None if self._budget else "length"

    @property
    def failure(self) -> Exception | None:
        """What ended this output before its time."""
        return self._chooser.failures[0] if self._chooser.failures else None

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self._budget - len(self._token_ids)

    @property
    def context_left(self) -> int:
        """Unused positions of the context."""
        return self._context - len(self.prompt) - len(self._token_ids)

    @property
    def wants_logits(self) -> bool:
        """True if log-probabilities were requested."""
        return self.params.logprobs is not None

    def take(self, tokens: Sequence[int], logits: Tensor | None, sources: Sequence[str] = ()) -> StreamEvent:
        """Adds the tokens of one step.

        Args:
            tokens: at least one token; tokens after the first stop are dropped.
            logits: (len(tokens), V), the logits they were chosen from; needed if `wants_logits`.
            sources: what drafted each token, or "target"; empty: all are the target's.
        """
        new: list[int] = []
        pieces: list[str] = []
        named = sources or ["target"] * len(tokens)
        for token, source in zip(tokens[: self.remaining], named, strict=False):
            new.append(token)
            self.sources[source] += 1
            if self._provenance is not None:
                self._provenance.token(token, source, self.occupant.stats.steps)
            self._judge(token, len(self._token_ids) + len(new), pieces)
            if self.finish_reason:
                break
        if self._detokenizer is not None and self._scanner is None and not self.finish_reason:
            pieces.append(self._decoded(self._detokenizer.release()))
        self._token_ids.extend(new)
        if self.finish_reason is None and self.remaining == 0:
            self.finish_reason = "length"
            self._finish_text(pieces)
        text = "".join(pieces)
        if text:
            self._texts.append(text)
        self.occupant.stats.emitted = len(self._token_ids)
        chosen, best = self._scored(new, logits)
        found = None if self._provenance is None else self._provenance.pieces(text, self.finish_reason is not None)
        return StreamEvent(
            self.index, new, text, self.finish_reason, None, self.sample, chosen, best, found, self.failure
        )

    def _scored(
        self, tokens: Sequence[int], logits: Tensor | None
    ) -> tuple[list[float] | None, list[dict[int, float]] | None]:
        if not self.wants_logits:
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

    def _judge(self, token: int, count: int, pieces: list[str]) -> None:
        """Sets the finish reason if `token`, the `count`-th, ends the output."""
        minimum = self.params.min_new_tokens
        ends = self._ends.get(token) if count > minimum else None
        if ends:
            self.finish_reason = ends
            self._finish_text(pieces)
            return
        if self._detokenizer is None:
            return
        self._detokenizer.add(token)
        if self._scanner is None and self._provenance is None:
            return  # the step's tokens are decoded together
        text = self._decoded(self._detokenizer.release())
        if self._scanner is None:
            pieces.append(text)
            return
        piece, stopped = self._scanner.scan(text, armed=count >= minimum)
        pieces.append(piece)
        if stopped:
            self.finish_reason = "stop"

    def _finish_text(self, pieces: list[str]) -> None:
        """Appends the held text; it may complete a stop string."""
        if self._detokenizer is None:
            return
        rest = self._decoded(self._detokenizer.finish())
        if self._scanner is None:
            pieces.append(rest)
            return
        piece, stopped = self._scanner.scan(rest)
        pieces.append(piece if stopped else piece + self._scanner.flush())
        if stopped:
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
        )
