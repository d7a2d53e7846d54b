"""A target without a network: its logits depend on the whole visible text, read from the cache.

Cheap enough for thousands of requests and exact: an entry that was lost, moved, copied wrongly
or masked wrongly changes the logits of everything after it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aquiline.cache import KVCache, new_cache
from aquiline.targets.attention import place
from aquiline.targets.target import TargetInput, TargetOutput, TargetShape

_PRIME = 2**31 - 1
_WEIGHTS = np.random.default_rng(1).integers(1, _PRIME, 4096)


def fingerprint(tokens: Sequence[int]) -> int:
    """A number that depends on every token and its place."""
    ids = np.asarray(tokens, dtype=np.int64) + 1
    return int((ids * _WEIGHTS[: len(ids)] % _PRIME).sum() % _PRIME)


class PathTarget:
    """Implements `Target`; feature 0 of a position is the fingerprint of the text up to it.

    Args:
        vocab_size: V.
        max_positions: context length.
        spread: standard deviation of the logits.
        variety: different rows of logits.
        seed: of the logits.
    """

    dtype = torch.float64
    device = torch.device("cpu")

    exact = False

    def __init__(
        self, vocab_size: int, max_positions: int = 256, *, spread: float = 3.0, variety: int = 1021, seed: int = 0
    ) -> None:
        self.shape = TargetShape(vocab_size, 1, 1, max_positions)
        generator = torch.Generator().manual_seed(seed)
        self._table = torch.randn(variety, vocab_size, generator=generator) * spread
        self.widths: list[tuple[int, int]] = []  # (rows, tokens) of each forward
        self.furthest = 0  # largest position so far

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        return new_cache(
            layers=1,
            rows=rows,
            kv_heads=1,
            key_dim=1,
            capacity=capacity,
            max_capacity=self.shape.max_positions,
            dtype=self.dtype,
        )

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """(V,) logits after `tokens`."""
        return self._table[fingerprint(tokens) % len(self._table)]

    def forward(self, inputs: TargetInput) -> TargetOutput:
        tokens, positions, ancestors, cache = inputs.tokens, inputs.positions, inputs.ancestors, inputs.cache
        rows, features, logits_at = inputs.rows, inputs.features, inputs.logits_at
        batch, width = tokens.shape
        self.widths.append((batch, width))
        self.furthest = max(self.furthest, int(positions.max()))
        assert len(set(rows)) == batch, "rows must be distinct"
        starts = place(cache, rows, width).starts
        seen = np.tril(np.ones((batch, width, width), bool)) if ancestors is None else ancestors.numpy()
        new, places = tokens.numpy(), positions.numpy()
        prints = np.zeros((batch, width), np.int64)
        for b, (row, start) in enumerate(zip(rows, starts, strict=True)):
            cache.keys(0)[row, 0, start : start + width, 0] = tokens[b].double()
            before = fingerprint(cache.keys(0)[row, 0, :start, 0].numpy())
            terms = (new[b] + 1) * _WEIGHTS[places[b]] % _PRIME
            prints[b] = (before + seen[b] @ terms) % _PRIME
        logits = self._table[torch.from_numpy(prints % len(self._table))]
        if logits_at is not None:
            logits = logits.gather(1, logits_at[:, :, None].expand(-1, -1, logits.shape[-1]))
        return TargetOutput(logits, torch.from_numpy(prints).double()[:, :, None] if features else None)

    def embed(self, tokens: Tensor) -> Tensor:
        return tokens[..., None].double()

    def project(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError("this target has no head")
