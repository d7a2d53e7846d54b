"""Chooses the target's tokens: the settings, the processed distribution, and the draw from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aquiline.checks import check_kind, check_value, flag, integer, number, several
from aquiline.race import draw, likeliest

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""Hugging Face's form: (input_ids (1, S) int64, scores (1, V) float32) → scores (1, V)."""


@dataclass(frozen=True)
class SamplingParams:
    """Settings of a request: the choice of its tokens, and its end.

    Attributes:
        max_new_tokens: upper bound on emitted tokens, ≥ 0; never exceeded.
        temperature: ≥ 0; 0 chooses the likeliest token.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of probability ≥ top_p, in (0, 1].
        min_p: drop tokens below min_p times the largest probability, in [0, 1).
        seed: seed of the request; None draws a fresh one. The draw for output position t
            depends only on (seed, t, the processed distribution).
        repetition_penalty: > 0; divides positive and multiplies negative logits of tokens that
            occur in the prompt or the output (Hugging Face's rule); 1 is off.
        presence_penalty: subtracted from tokens that occur in the output (OpenAI's rule).
        frequency_penalty: subtracted once for each occurrence in the output.
        logit_bias: token id → added to its logit.
        min_new_tokens: bars end-of-sequence tokens until this many tokens were emitted.
        stop: strings that end the output and are cut off; a special token, which has no text, ends it too.
        stop_token_ids: tokens that end the output, in addition to the model's own.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        logprobs: None for none, else the number of alternatives to report in addition to each
            emitted token's log-probability (float32, before temperature and processors).
        n: outputs per prompt, ≥ 1.
        skip_special_tokens: leave special tokens out of the text; a token that ends the output never has text.
        logits_processors: Hugging Face processors; they run in order, on visited nodes only, each
            with that node's own prefix.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    skip_special_tokens: bool = True
    logits_processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        self._settle_kinds()
        check_value("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 0, "an integer ≥ 0")
        check_value("min_new_tokens", self.min_new_tokens, self.min_new_tokens >= 0, "an integer ≥ 0")
        finite = math.isfinite(self.temperature) and self.temperature >= 0
        check_value("temperature", self.temperature, finite, "a finite number ≥ 0 (0 is greedy)")
        check_value("top_k", self.top_k, self.top_k >= 0, "an integer ≥ 0 (0 is off)")
        check_value("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1] (1 is off)")
        check_value("min_p", self.min_p, 0 <= self.min_p < 1, "in [0, 1) (0 is off)")
        penalty = math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0
        check_value("repetition_penalty", self.repetition_penalty, penalty, "a finite number > 0 (1 is off)")
        for name in ("presence_penalty", "frequency_penalty"):
            check_value(name, getattr(self, name), math.isfinite(getattr(self, name)), "a finite number (0 is off)")
        check_value("n", self.n, self.n >= 1, "an integer ≥ 1")
        check_value("logprobs", self.logprobs, self.logprobs is None or self.logprobs >= 0, "None or an integer ≥ 0")
        seeded = self.seed is None or -(1 << 63) <= self.seed < 1 << 64
        check_value("seed", self.seed, seeded, "None or an integer of 64 bits")
        check_value("stop", self.stop, all(self.stop), "non-empty strings")
        usable = all(math.isfinite(bias) or bias == -math.inf for bias in self.logit_bias.values())
        check_value("logit_bias", self.logit_bias, usable, "finite numbers, or -inf to bar a token")

    def _settle_kinds(self) -> None:
        """Converts values to their declared types where that loses nothing; rejects the rest."""
        settled: dict[str, Any] = {name: integer(name, getattr(self, name)) for name in _INTEGERS}
        optional = (name for name in ("seed", "logprobs") if getattr(self, name) is not None)
        settled |= {name: integer(name, getattr(self, name)) for name in optional}
        settled |= {name: number(name, getattr(self, name)) for name in _NUMBERS}
        stop = (self.stop,) if isinstance(self.stop, str) else several("stop", self.stop, "a string, or several")
        check_kind("stop", self.stop, all(isinstance(text, str) for text in stop), "a string, or several")
        ids = tuple(integer("stop_token_ids", token) for token in several("stop_token_ids", self.stop_token_ids))
        check_kind("logit_bias", self.logit_bias, isinstance(self.logit_bias, Mapping), "token id → number")
        bias = {integer("logit_bias", token): number("logit_bias", b) for token, b in self.logit_bias.items()}
        processors = several("logits_processors", self.logits_processors)
        usable = all(callable(processor) or hasattr(processor, "for_request") for processor in processors)
        check_kind(
            "logits_processors", self.logits_processors, usable, "several callables (input_ids, scores) → scores"
        )
        flag("ignore_eos", self.ignore_eos)
        flag("skip_special_tokens", self.skip_special_tokens)
        settled |= {"stop": stop, "stop_token_ids": ids, "logit_bias": bias, "logits_processors": processors}
        for name, value in settled.items():
            object.__setattr__(self, name, value)

    @property
    def plain_greedy(self) -> bool:
        """True if the next token is the arg-max of the raw logits, whatever the prefix."""
        return self.temperature == 0 and not self.has_processors

    @property
    def has_processors(self) -> bool:
        """True if logits change before the temperature is applied."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.min_new_tokens
            or self.logits_processors
        )


_INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k", "n")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class LossyRule:
    """An opt-in acceptance rule that CHANGES the output distribution.

    Attributes:
        kind: "threshold" (SGLang's two thresholds) or "typical" (Medusa's).
        single: for threshold: accept a child with at least this target probability, in (0, 1].
        accumulated: for threshold: divisor of the accumulated probability in the coin test, in (0, 1].
        epsilon: for typical: upper bound of the acceptance threshold.
        delta: for typical: factor on exp(-entropy).
    """

    kind: str
    single: float = 1.0
    accumulated: float = 1.0
    epsilon: float = 0.3
    delta: float = 0.09

    def __post_init__(self) -> None:
        if self.kind not in ("threshold", "typical"):
            raise ValueError(f"lossy rule {self.kind!r} is not known; allowed: threshold, typical")
        for name in ("single", "accumulated", "epsilon", "delta"):
            value = number(name, getattr(self, name))
            check_value(name, value, 0 < value <= 1, "in (0, 1]")

    @property
    def exact(self) -> bool:
        """True for thresholds of 1, which have no effect."""
        return self.kind == "threshold" and self.single == 1 and self.accumulated == 1


def check_lossy(rule: LossyRule, temperature: float) -> None:
    """Raises ValueError where a rule has nothing to relax: at temperature 0, unless it is exact."""
    if temperature == 0 and not rule.exact:
        raise ValueError(
            "temperature is 0, but lossy acceptance needs temperature > 0; remove the lossy rule for greedy output"
        )


def processed_logits(
    logits: Tensor,
    params: SamplingParams,
    prefix: Sequence[int],
    prompt_length: int,
    end_ids: Sequence[int] = (),
) -> Tensor:
    """Applies penalties, bias, the minimum length and user processors, in this order.

    Args:
        logits: (V,) float32 of one node; not modified.
        prefix: all tokens before this one: prompt, then output.
        end_ids: end tokens, barred until `min_new_tokens` tokens were emitted.

    Returns:
        (V,) float32.
    """
    if not params.has_processors:
        return logits
    scores = logits.clone()
    if params.repetition_penalty != 1 and prefix:
        seen = torch.tensor(sorted(set(prefix)), device=scores.device)
        old = scores[seen]
        scores[seen] = torch.where(old < 0, old * params.repetition_penalty, old / params.repetition_penalty)
    output = prefix[prompt_length:]
    if (params.presence_penalty or params.frequency_penalty) and output:
        ids, counts = torch.unique(torch.tensor(output, device=scores.device), return_counts=True)
        scores[ids] -= params.presence_penalty + params.frequency_penalty * counts
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if len(output) < params.min_new_tokens and end_ids:
        scores[list(end_ids)] = -torch.inf
    for processor in params.logits_processors:
        ids = torch.tensor([list(prefix)], dtype=torch.int64, device=scores.device)
        scores = _returned(processor, processor(ids, scores[None]), len(scores))[0]
    return scores


def _returned(processor: LogitsProcessor, scores: Any, vocabulary: int) -> Tensor:
    """Checks what a user's processor returned."""
    if isinstance(scores, Tensor) and scores.shape == (1, vocabulary):
        return scores
    found = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
    raise TypeError(f"the logits processor {processor!r} returned {found}; allowed: scores of shape (1, {vocabulary})")


_COLD = 1e-30
"""Temperatures below this overflow float32 when logits are divided by them."""


def distribution(scores: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, then top-k, top-p, min-p (Hugging Face's order), then softmax.

    Args:
        scores: (…, V) processed logits.
        params: settings with temperature > 0.

    Returns:
        (…, V) float32 probabilities.
    """
    scores = scores.float()
    if params.temperature < _COLD:
        # Dividing by such a number overflows, and ∞ − ∞ is NaN; relative to the best score, the rest vanish.
        scores = scores - scores.amax(-1, keepdim=True)
    scores = scores / max(params.temperature, torch.finfo(torch.float32).tiny)
    if 0 < params.top_k < scores.shape[-1]:
        kth = scores.topk(params.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if params.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        # The likeliest token has cumulative mass 0 before it, so it stays; float32 rounds a tiny top_p to 0.
        drop = before >= max(params.top_p, torch.finfo(torch.float32).tiny)
        scores = scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
    if params.min_p > 0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return scores.softmax(-1)


TokenDraw = Callable[[Tensor, SamplingParams, int, int], int | None]
"""(processed logits (V,), settings, seed, output position) → the token that `draw` gives for their distribution, found
faster, or None where only `draw` can tell."""


@dataclass(frozen=True, eq=False)
class TokenChooser:
    """Chooses the target's own token at a node, given that node's prefix.

    Attributes:
        seed: the request's seed, already resolved.
        end_ids: end tokens, barred by `min_new_tokens`.
        fast: asked before the distribution is computed.
    """

    params: SamplingParams
    seed: int
    prompt_length: int
    end_ids: tuple[int, ...] = ()
    fast: TokenDraw | None = None

    def probabilities(self, logits: Tensor, prefix: Sequence[int]) -> Tensor:
        """(V,) float32 distribution that the token is drawn from (temperature > 0)."""
        return distribution(
            processed_logits(logits, self.params, prefix, self.prompt_length, self.end_ids), self.params
        )

    def __call__(self, logits: Tensor, prefix: Sequence[int]) -> int:
        """Returns the token after `prefix`; `logits` (V,) are the target's at its last token."""
        scores = processed_logits(logits, self.params, prefix, self.prompt_length, self.end_ids)
        if self.params.temperature == 0:
            return likeliest(scores, -math.inf)
        position = len(prefix) - self.prompt_length
        token = self.fast(scores, self.params, self.seed, position) if self.fast else None
        return draw(distribution(scores, self.params), self.seed, position) if token is None else token
