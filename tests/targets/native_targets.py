"""Native copies of random decoders, filled caches and draft trees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aquiline.cache import KVCache, commit
from aquiline.native.codes import WeightFormat
from aquiline.targets.decoder import Decoder, DecoderConfig
from aquiline.targets.layers import LayerConfig
from aquiline.targets.native import NativeDecoder, native
from aquiline.targets.rope import RopeConfig
from aquiline.targets.target import Target, TargetInput, TargetOutput
from tests.tiny import VOCAB

TOLERANCE = 1e-5
"""Relative to the largest value: float32 sums in another order."""


def copy_of(reference: Decoder, form: WeightFormat | None = None) -> NativeDecoder:
    result = native(reference, form=form)
    assert result is not None, "CI machines have a compiler"
    return result


def random_decoder(
    heads: tuple[int, int],
    dim: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype = torch.float32,
    *,
    windows: tuple[int | None, ...] = (None, None, None),
    rotary_dim: int | None = None,
    vocab: int = VOCAB,
    **changes: Any,
) -> Decoder:
    """Three layers of any shape, scaled so that the stream stays near 1."""
    rope = RopeConfig(10000.0, rotary_dim or dim)
    layer = LayerConfig(hidden, inner, *heads, dim, 1e-6, rope, **changes)
    config = DecoderConfig(layer, vocab, len(windows), 4096, windows, (True,) * (len(windows) - 1) + (False,), False)
    torch.manual_seed(3)
    model = Decoder(config).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=1.0 if "embed" in name else parameter.shape[1] ** -0.5)
        else:
            parameter.uniform_(0.5, 1.5)
    return model.to(dtype).eval()


def fill(target: Target, lengths: list[int], seed: int = 0, rows: list[int] | None = None) -> KVCache:
    """A cache that holds `lengths[b]` random tokens in row `rows[b]`."""
    rows = rows or list(range(len(lengths)))
    cache = target.new_cache(max(rows) + 1, 8)
    generator = torch.Generator().manual_seed(seed)
    for row, length in zip(rows, lengths, strict=True):
        if length:
            tokens = torch.randint(0, VOCAB, (1, length), generator=generator)
            nothing = torch.empty(1, 0, dtype=torch.int64)
            target.forward(TargetInput(tokens, torch.arange(length)[None], None, cache, [row], logits_at=nothing))
            commit(cache, torch.arange(length)[None], [row])
    return cache


def duplicate(cache: KVCache) -> KVCache:
    return replace(
        cache, key_block=cache.key_block.clone(), value_block=cache.value_block.clone(), lengths=cache.lengths.clone()
    )


def chain(lengths: list[int], width: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (len(lengths), width), generator=generator)
    return tokens, torch.tensor(lengths)[:, None] + torch.arange(width)


def ancestors_of(parents: list[int]) -> tuple[Tensor, Tensor]:
    """(N, N) who sees whom, and (N,) depths."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    depth = torch.zeros(len(parents), dtype=torch.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
            depth[node] = depth[parent] + 1
    return seen, depth


def assert_close(actual: TargetOutput, expected: TargetOutput, tolerance: float = TOLERANCE) -> None:
    assert actual.logits.dtype == torch.float32
    if actual.best is not None:  # the kernels' alone
        assert_best(actual)
    for ours, theirs in ((actual.logits, expected.logits), (actual.features, expected.features)):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None and theirs.numel():
            assert ours.shape == theirs.shape
            assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def assert_best(out: TargetOutput) -> None:
    """The kernels' arg-max is that of their logits: the first of equals, -1 where a number is NaN."""
    assert out.best is not None
    first = torch.from_numpy(out.logits.numpy().argmax(-1))
    assert torch.equal(out.best, first.masked_fill(out.logits.isnan().any(-1), -1))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
