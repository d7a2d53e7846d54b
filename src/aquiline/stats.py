"""Counts what a generation did; every rate is a property."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

Judged = tuple[str, bool]
"""What drafted a token, and whether it was accepted."""


class Timer:
    """Adds the seconds of a `with` block to a phase. A class: a generator's switches cost several times as much."""

    __slots__ = ("began", "phase", "seconds")

    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self.seconds, self.phase, self.began = seconds, phase, 0.0

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + time.perf_counter() - self.began


@dataclass
class GenerationStats:
    """Counters of a generation, added up over steps and rows.

    Attributes:
        steps: target forwards that verified a tree, counted per row.
        emitted: emitted tokens, without those cut off at a stop.
        drafted: those of them whose tree held a draft.
        nodes: drafted nodes that the target computed, without roots.
        offered_at: offered_at[d] counts steps whose tree had a node at depth d + 1 below an accepted one.
        accepted_at: accepted_at[d] counts steps that accepted a node at depth d + 1.
        seconds: phase → seconds (prefill, draft, target, accept, commit, extend, other).
        sources: emitted tokens by what drafted them ("head", "lookup", "shared", "prediction", …); "target"
            counts those that the target chose itself.
        lossy: whether a rule that changes the output distribution was active.
    """

    steps: int = 0
    drafted: int = 0
    emitted: int = 0
    nodes: int = 0
    prompt_tokens: int = 0
    accepted: int = 0
    offered_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    sources: Counter[str] = field(default_factory=Counter)
    lossy: bool = False

    @property
    def mean_accept_length(self) -> float:
        """τ: emitted tokens per target forward = 1 + mean accepted drafts, as in the papers."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> list[float]:
        """n-α for chains: share accepted at depth n + 1, where depth n was accepted and n + 1 offered."""
        return [
            accepted / offered if offered else 0.0
            for accepted, offered in zip(self.accepted_at, self.offered_at, strict=True)
        ]

    @property
    def decode_seconds(self) -> float:
        """Seconds outside the prefill."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase != "prefill")

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second, prefill included."""
        total = sum(self.seconds.values())
        return self.emitted / total if total else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Emitted tokens per second of decoding, prefill excluded."""
        return self.emitted / self.decode_seconds if self.decode_seconds else 0.0

    def count_step(self, num_accepted: int, deepest_offered: int, nodes: int) -> None:
        """Adds one verified tree.

        Args:
            deepest_offered: depth down to which the tree offered nodes along the accepted path:
                `num_accepted`, or one more if the last accepted node had children.
            nodes: drafted nodes, without the root.
        """
        self.steps += 1
        self.drafted += nodes > 0
        self.nodes += nodes
        self.accepted += num_accepted
        while len(self.offered_at) < deepest_offered:
            self.offered_at.append(0)
            self.accepted_at.append(0)
        for depth in range(deepest_offered):
            self.offered_at[depth] += 1
        for depth in range(num_accepted):
            self.accepted_at[depth] += 1

    def add(self, other: GenerationStats) -> None:
        """Adds the counters of `other`."""
        for name in ("steps", "drafted", "emitted", "nodes", "prompt_tokens", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("offered_at", "accepted_at"):
            mine, theirs = getattr(self, name), getattr(other, name)
            mine.extend([0] * (len(theirs) - len(mine)))
            for i, count in enumerate(theirs):
                mine[i] += count
        for phase, seconds in other.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self.sources.update(other.sources)
        self.lossy = self.lossy or other.lossy

    def timed(self, phase: str) -> Timer:
        """Adds the wall-clock seconds of the block to `phase`."""
        return Timer(self.seconds, phase)
