"""Requests and replies of regeneration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from aquiline.training.data.conversations import Message


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
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; allowed: 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; allowed: 0 < top_p ≤ 1")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; allowed: 1 or more")


@dataclass(frozen=True)
class ReplyRequest:
    """A history that ends with a user turn, and the seed for its answer (63 bits)."""

    messages: tuple[Message, ...]
    seed: int


@dataclass(frozen=True)
class Reply:
    """An answer.

    Attributes:
        text: what the target said.
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
