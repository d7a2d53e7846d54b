"""The cache slot by slot: what a commit keeps, what growing keeps, what a copied beginning holds."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from aquiline.cache import SCRATCH, KVCache, commit, copy_prefix, new_cache, truncate

CONTEXT = 100


def filled(lengths: list[int]) -> KVCache:
    """A cache whose every number is its own, keys and values of different widths."""
    cache = new_cache(
        layers=2,
        rows=len(lengths),
        kv_heads=2,
        key_dim=3,
        value_dim=4,
        capacity=40,
        max_capacity=CONTEXT,
        dtype=torch.float64,
    )
    cache.key_block[:] = torch.arange(cache.key_block.numel()).view_as(cache.key_block)
    cache.value_block[:] = -1.0 - torch.arange(cache.value_block.numel()).view_as(cache.value_block)
    cache.lengths[:] = torch.tensor(lengths)
    return cache


@pytest.mark.parametrize("seed", range(20))
def test_a_commit_keeps_the_path_in_order_and_touches_nothing_else_that_counts(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randrange(20) for _ in range(3)]
    cache, before = filled(lengths), filled(lengths)
    rows = rng.sample(range(3), 2)
    paths = [[0, *sorted(rng.sample(range(1, 9), rng.randrange(5)))] for _ in rows]
    width = max(map(len, paths))
    commit(cache, torch.tensor([path + [-1] * (width - len(path)) for path in paths]), rows)
    for row in range(3):
        path = paths[rows.index(row)] if row in rows else []
        assert int(cache.lengths[row]) == lengths[row] + len(path)
        slots = [*range(lengths[row]), *(lengths[row] + node for node in path)]
        for block, old in ((cache.key_block, before.key_block), (cache.value_block, before.value_block)):
            assert torch.equal(block[:, row, :, : len(slots)], old[:, row][:, :, slots])


def test_growing_keeps_the_content_and_leaves_no_garbage() -> None:
    """A masked slot meets a weight of 0, and 0 times NaN were NaN: new slots must hold numbers."""
    cache, before = filled([5, 7]), filled([5, 7])
    block = cache.key_block
    cache.reserve(before.capacity)
    assert cache.key_block is block, "nothing to do"
    for positions in (before.capacity + 1, 90, CONTEXT + SCRATCH):
        cache.reserve(positions)
        assert positions <= cache.capacity <= CONTEXT + SCRATCH
        for block, old in ((cache.key_block, before.key_block), (cache.value_block, before.value_block)):
            assert torch.equal(block[..., : before.capacity, :], old)
            assert not block[..., before.capacity :, :].any()
    with pytest.raises(ValueError, match=f"{CONTEXT + SCRATCH + 1} positions do not fit: .* is {CONTEXT}, .*; shorten"):
        cache.reserve(CONTEXT + SCRATCH + 1)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_rows_that_nobody_uses_take_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    sizes: dict[str, Any] = {"layers": 4, "rows": 16, "kv_heads": 4, "key_dim": 64, "dtype": torch.bfloat16}
    cache = new_cache(capacity=1024, max_capacity=8192, **sizes)
    for block in cache.blocks:
        block[:, 3, :, :1000] = 1.0
    cache.lengths[3] = 1000
    cache.reserve(4096)
    assert all(block[:, 3, :, :1000].all() and block[:, 3].sum() == 4 * 4 * 1000 * 64 for block in cache.blocks)
    whole = sum(block.nbytes for block in cache.blocks)
    assert whole > 250e6 and resident() - before < 0.25 * whole


def test_a_copied_beginning_is_the_sources_and_nothing_else_moves() -> None:
    cache, before = filled([9, 4, 6]), filled([9, 4, 6])
    copy_prefix(cache, 0, 2, 8)
    assert cache.lengths.tolist() == [9, 4, 8]
    for block, old in ((cache.key_block, before.key_block), (cache.value_block, before.value_block)):
        assert torch.equal(block[:, 2, :, :8], old[:, 0, :, :8])
        assert torch.equal(block[:, 2, :, 8:], old[:, 2, :, 8:]) and torch.equal(block[:, :2], old[:, :2])
    with pytest.raises(AssertionError, match="longer than its source"):
        copy_prefix(cache, 1, 0, 5)


def test_a_row_can_only_be_cut_to_less() -> None:
    cache = filled([9, 4])
    truncate(cache, 0, 3)
    assert cache.lengths.tolist() == [3, 4]
    with pytest.raises(AssertionError, match="truncated"):
        truncate(cache, 1, 5)
