"""Defines the settings, requests and replies of regeneration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from aquiline.checks import SEEDS, check_settings, check_value, setting
from aquiline.training.data.messages import Message


@dataclass(frozen=True)
class ReplySampling:
    """Sampling settings of a reply.

    Attributes:
        temperature: ≥ 0; 0 is greedy.
        top_p: in (0, 1].
        max_new_tokens: upper bound on tokens per answer, ≥ 1.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 512

    def __post_init__(self) -> None:
        check_value("temperature", self.temperature, self.temperature >= 0, "≥ 0; 0 is greedy")
        check_value("top_p", self.top_p, 0 < self.top_p <= 1, "0 < top_p ≤ 1")
        check_value("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "≥ 1")


@dataclass(frozen=True)
class RegenerateSettings:
    """Settings of regeneration.

    Attributes:
        mixture: samplings with weights > 0; each conversation draws one.
    """

    mixture: tuple[tuple[ReplySampling, float], ...] = ((ReplySampling(), 1.0),)
    in_flight: int = setting(
        1, "requests at the same time, each in a thread (with --endpoint)", allowed="≥ 1", shown="32"
    )
    batch_size: int = setting(
        1, "conversations answered together by the local engine", allowed="≥ 1", shown="64", flag="rows"
    )
    max_turns: int | None = setting(None, "most turns of a conversation to answer", allowed="≥ 1", shown="all")
    limit: int | None = setting(None, "stop after this many conversations", allowed="≥ 1", shown="all of them")
    seed: int = setting(0, "seed of sampled answers, and of each conversation's draw from the mixture", allowed=SEEDS)

    def __post_init__(self) -> None:
        check_settings(self)
        good = bool(self.mixture) and all(weight > 0 for _, weight in self.mixture)
        check_value("mixture", self.mixture, good, "samplings with weights above 0")

    def deciding(self) -> dict[str, Any]:
        """The settings that determine the answers, as JSON-able values."""
        mixture = [{**asdict(sampling), "weight": weight} for sampling, weight in self.mixture]
        return {"mixture": mixture, "max_turns": self.max_turns, "seed": self.seed}


@dataclass(frozen=True)
class ReplyRequest:
    """A history that ends with a user turn, and the seed for its answer (63 bits)."""

    messages: tuple[Message, ...]
    seed: int


@dataclass(frozen=True)
class Reply:
    """An answer.

    Attributes:
        text: the target's words.
        finished: False if the token budget cut it off.
        refused: the reason why this request has no answer, such as a history longer than the context. Errors that
            are not specific to the request raise an exception instead.
        reasoning: the thoughts that a server returned apart from the text.
    """

    text: str
    finished: bool = True
    refused: str | None = None
    reasoning: str = ""


Complete: TypeAlias = Callable[[Sequence[ReplyRequest], ReplySampling], Sequence[Reply]]
"""Answers requests, in order. Called from several threads if ``in_flight`` > 1."""
