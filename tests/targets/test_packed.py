"""The packed decoder computes what the reference decoder computes."""

from __future__ import annotations

import pytest
import torch

from aquiline.cache import SCRATCH, KVCache, commit
from aquiline.targets import packed_layers
from aquiline.targets.decoder import Decoder
from aquiline.targets.packed import PackedDecoder, packed
from aquiline.targets.target import Target, TargetOutput
from tests.tiny import FAMILIES, VOCAB, decoder

FLOAT32_TOLERANCE = 2e-4


def pack(family: str, dtype: torch.dtype = torch.float32) -> tuple[Decoder, PackedDecoder]:
    reference = decoder(family, dtype)
    copy = packed(reference)
    assert copy is not None, "CI machines have these kernels"
    return reference, copy


def fill(target: Target, lengths: list[int], seed: int = 0, rows: list[int] | None = None) -> KVCache:
    """A cache that holds `lengths[b]` random tokens in row `rows[b]`."""
    rows = rows or list(range(len(lengths)))
    cache = target.new_cache(max(rows) + 1, 8)
    generator = torch.Generator().manual_seed(seed)
    for row, length in zip(rows, lengths, strict=True):
        if length:
            tokens = torch.randint(0, VOCAB, (1, length), generator=generator)
            target.forward(tokens, torch.arange(length)[None], None, cache, [row])
            commit(cache, torch.arange(length)[None], [row])
    return cache


def chain(lengths: list[int], width: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (len(lengths), width), generator=generator)
    return tokens, torch.tensor(lengths)[:, None] + torch.arange(width)


def binary_tree(lengths: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ancestors and positions of the tree in which node i hangs below node (i - 1) // 2."""
    seen = torch.zeros(width, width, dtype=torch.bool)
    depth = torch.zeros(width, dtype=torch.int64)
    for node in range(width):
        if node:
            parent = (node - 1) // 2
            seen[node], depth[node] = seen[parent], depth[parent] + 1
        seen[node, node] = True
    return seen.expand(len(lengths), -1, -1), torch.tensor(lengths)[:, None] + depth


def assert_close(actual: TargetOutput, expected: TargetOutput, tolerance: float = FLOAT32_TOLERANCE) -> None:
    torch.testing.assert_close(actual.logits, expected.logits, atol=tolerance, rtol=tolerance)
    assert actual.logits.dtype == torch.float32
    assert (actual.features is None) == (expected.features is None)
    if actual.features is not None and expected.features is not None:
        # The stream grows to several tens in these models, the logits do not.
        torch.testing.assert_close(actual.features, expected.features, atol=10 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_the_reference_in_every_family(family: str) -> None:
    reference, copy = pack(family)
    for lengths in ([17], [30, 3, 30], [9, 9, 9]):
        ours, theirs = fill(copy, lengths), fill(reference, lengths)
        rows = list(range(len(lengths)))
        for width in (1, 2, 7):
            tokens, positions = chain(lengths, width)
            features = (0, 2, 7, "final")
            call = (tokens, positions, None)
            assert_close(copy.forward(*call, ours, rows, features), reference.forward(*call, theirs, rows, features))


@pytest.mark.parametrize("width", [1, 2, 3, 8, 16, 31, 64])
@pytest.mark.parametrize("lengths", [[20], [40, 0, 13]])
def test_packed_equals_the_reference_at_every_width_of_a_tree(width: int, lengths: list[int]) -> None:
    reference, copy = pack("mistral")
    ours, theirs = fill(copy, lengths), fill(reference, lengths)
    rows = list(range(len(lengths)))
    tokens, _ = chain(lengths, width)
    ancestors, positions = binary_tree(lengths, width)
    actual = copy.forward(tokens, positions, ancestors, ours, rows, (3,))
    assert_close(actual, reference.forward(tokens, positions, ancestors, theirs, rows, (3,)))


@pytest.mark.parametrize("rows", [[2, 0, 1], [0, 2, 3], [4, 5, 1]])
def test_rows_may_be_any_slots_in_any_order(rows: list[int]) -> None:
    reference, copy = pack("qwen3")
    for lengths in ([11, 11, 11], [5, 20, 11]):
        ours, theirs = fill(copy, lengths, rows=rows), fill(reference, lengths, rows=rows)
        for width in (1, 5):
            tokens, positions = chain(lengths, width)
            assert_close(
                copy.forward(tokens, positions, None, ours, rows),
                reference.forward(tokens, positions, None, theirs, rows),
            )


def test_a_forward_is_idempotent_and_writes_no_other_slot() -> None:
    _, copy = pack("llama")
    cache = fill(copy, [12, 7, 4])
    before = cache.key_block.clone()
    tokens, positions = chain([7, 4], 5)
    first = copy.forward(tokens, positions, None, cache, [1, 2])
    assert torch.equal(copy.forward(tokens, positions, None, cache, [1, 2]).logits, first.logits)
    assert cache.lengths.tolist() == [12, 7, 4]
    changed = (cache.key_block != before).any(-1).any(2).any(0)
    expected = torch.zeros_like(changed)
    expected[1, 7:12] = expected[2, 4:9] = True
    assert torch.equal(changed, expected)


def test_an_earlier_output_survives_the_next_forward() -> None:
    _, copy = pack("llama")
    cache = fill(copy, [12])
    tokens, positions = chain([12], 4)
    first = copy.forward(tokens, positions, None, cache, [0], (2,))
    kept, features = first.logits.clone(), first.features
    assert features is not None
    features = features.clone()
    copy.forward(tokens + 1, positions, None, cache, [0], (2,))
    assert torch.equal(first.logits, kept)
    assert first.features is not None and torch.equal(first.features, features)


def test_commit_and_growth_leave_the_cache_of_the_reference() -> None:
    reference, copy = pack("qwen2")
    ours, theirs = fill(copy, [50]), fill(reference, [50])
    tokens, _ = chain([50], 31)
    ancestors, positions = binary_tree([50], 31)
    for target, cache in ((copy, ours), (reference, theirs)):
        assert cache.capacity >= 50
        target.forward(tokens, positions, ancestors, cache, [0])
        assert cache.capacity >= 81
        commit(cache, torch.tensor([[0, 2, 5, 12, -1]]), [0])
    assert ours.lengths.tolist() == theirs.lengths.tolist() == [54]
    torch.testing.assert_close(ours.key_block[..., :54, :], theirs.key_block[..., :54, :], atol=1e-4, rtol=1e-4)


def test_chunks_of_a_prompt_equal_one_pass() -> None:
    _, copy = pack("mistral")
    tokens = torch.randint(0, VOCAB, (1, 60), generator=torch.Generator().manual_seed(3))
    whole, pieces = copy.new_cache(1, 64), copy.new_cache(1, 64)
    expected = copy.forward(tokens, torch.arange(60)[None], None, whole, [0]).logits[:, -1]
    for start in range(0, 60, 20):
        part = slice(start, start + 20)
        last = copy.forward(tokens[:, part], torch.arange(60)[None, part], None, pieces, [0]).logits[:, -1]
        commit(pieces, torch.arange(20)[None], [0])
    torch.testing.assert_close(last, expected, atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)


def test_logits_at_picks_positions() -> None:
    _, copy = pack("llama")
    cache = fill(copy, [6, 9])
    tokens, positions = chain([6, 9], 5)
    every = copy.forward(tokens, positions, None, cache, [0, 1]).logits
    some = copy.forward(tokens, positions, None, cache, [0, 1], logits_at=torch.tensor([[4, 0], [1, 1]])).logits
    picked = torch.stack((every[0, [4, 0]], every[1, [1, 1]]))
    torch.testing.assert_close(some, picked, atol=1e-5, rtol=1e-5)
    none = copy.forward(tokens, positions, None, cache, [0, 1], logits_at=torch.empty(2, 0, dtype=torch.int64))
    assert none.logits.shape == (2, 0, VOCAB)


def test_final_features_project_to_the_logits() -> None:
    _, copy = pack("llama-bias-tied")
    cache = fill(copy, [6])
    tokens, positions = chain([6], 5)
    out = copy.forward(tokens, positions, None, cache, [0], ("final",))
    assert out.features is not None
    torch.testing.assert_close(copy.project(out.features), out.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_bfloat16_stays_within_the_noise_of_the_reference(family: str) -> None:
    reference, copy = pack(family, torch.bfloat16)
    lengths = [30, 12]
    exact = Decoder(reference.config).requires_grad_(False)
    exact.load_state_dict(reference.state_dict())
    tokens, positions = chain(lengths, 8)
    outputs = [
        target.forward(tokens, positions, None, fill(target, lengths), [0, 1]).logits
        for target in (copy, reference, exact)
    ]
    error, noise = ((o - outputs[2]).square().mean().sqrt() for o in outputs[:2])
    assert error < 1.5 * noise


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_a_chain_has_the_bits_of_one_by_one_in_bfloat16(family: str) -> None:
    _, copy = pack(family, torch.bfloat16)
    assert copy.exact
    length = 90  # crosses a block of keys
    tokens = torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(5))

    def feed(width: int, decoys: int) -> tuple[torch.Tensor, torch.Tensor]:
        cache, rows = copy.new_cache(1, length + 64), []
        for start in range(0, length, width):
            chain = tokens[:, start : start + width]
            count = chain.shape[1]
            fed = torch.cat((chain, (chain[:, :1] + 1).expand(-1, decoys) % VOCAB), 1)
            seen = torch.ones(count + decoys, count + decoys).tril().bool()
            seen[count:, 1:count] = False  # decoys hang below the first node, as a chain
            positions = start + seen.sum(1)[None] - 1
            out = copy.forward(fed, positions, seen[None] if decoys else None, cache, [0], ("final",))
            assert out.features is not None
            rows.append(torch.cat((out.logits[:, :count], out.features[:, :count].float()), -1))
            commit(cache, torch.arange(count)[None], [0])
        return torch.cat(rows, 1), cache.key_block[..., :length, :]

    alone, keys = feed(1, 0)
    for width, decoys in ((2, 0), (3, 0), (5, 0), (6, 5), (8, 24), (11, 0)):
        together, same_keys = feed(width, decoys)
        assert torch.equal(together, alone), (width, decoys)
        assert torch.equal(same_keys, keys), (width, decoys)


def test_rows_of_a_batch_have_the_bits_that_they_have_alone() -> None:
    _, copy = pack("llama", torch.bfloat16)
    lengths = [70, 3, 64, 20]
    cache = fill(copy, lengths)
    for width in (1, 4):
        tokens, positions = chain(lengths, width)
        together = copy.forward(tokens, positions, None, cache, [0, 1, 2, 3]).logits
        for row in range(4):
            alone = copy.forward(tokens[row : row + 1], positions[row : row + 1], None, cache, [row]).logits
            assert torch.equal(alone[0], together[row]), (width, row)


def test_a_node_may_see_later_nodes() -> None:
    reference, copy = decoder("llama", torch.float32), packed(decoder("llama", torch.float32), exact=True)
    assert copy is not None and copy.exact
    ours, theirs = fill(copy, [60]), fill(reference, [60])
    tokens, positions = chain([60], 8)
    everyone = torch.ones(1, 8, 8, dtype=torch.bool)
    assert_close(
        copy.forward(tokens, positions, everyone, ours, [0]),
        reference.forward(tokens, positions, everyone, theirs, [0]),
    )


@pytest.mark.parametrize("exact", [True, False])
def test_many_rows(exact: bool) -> None:
    reference, copy = decoder("mistral", torch.float32), packed(decoder("mistral", torch.float32), exact)
    assert copy is not None
    lengths = [(7 * row) % 40 for row in range(12)]
    ours, theirs = fill(copy, lengths), fill(reference, lengths)
    for width in (1, 3):
        tokens, positions = chain(lengths, width)
        rows = list(range(12))
        assert_close(
            copy.forward(tokens, positions, None, ours, rows), reference.forward(tokens, positions, None, theirs, rows)
        )


def test_the_python_loop_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _, copy = pack("qwen2")
    assert copy.compiled and "compiled loop" in copy.describe()

    def refuse(function: object) -> None:
        raise RuntimeError("no TorchScript")

    monkeypatch.setattr(torch.jit, "script", refuse)
    packed_layers.compiled.cache_clear()
    try:
        _, plain = pack("qwen2")
    finally:
        packed_layers.compiled.cache_clear()
    assert not plain.compiled and "Python loop" in plain.describe()
    tokens, positions = chain([9, 4], 3)
    results = [t.forward(tokens, positions, None, fill(t, [9, 4]), [0, 1]).logits for t in (copy, plain)]
    assert torch.equal(results[0], results[1])


def test_a_dtype_without_kernels_is_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed(decoder("llama", torch.float64)) is None
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert packed(decoder("llama", torch.float32)) is None


def test_the_originals_weights_are_not_kept_alive() -> None:
    reference = Decoder(decoder("llama", torch.float32).config)
    copy = packed(reference)
    assert copy is not None
    shared = {reference.embed_tokens.weight.data_ptr()}
    originals = {p.data_ptr() for p in reference.parameters()} - shared
    held = {t.data_ptr() for t in _tensors(vars(copy)) if not t.is_mkldnn}
    assert not held & originals
    assert shared <= held


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for child in children for tensor in _tensors(child)]


def test_unknown_features_and_full_contexts_are_refused() -> None:
    _, copy = pack("llama")
    cache = fill(copy, [3])
    tokens, positions = chain([3], 2)
    with pytest.raises(ValueError, match="unknown target feature 8"):
        copy.forward(tokens, positions, None, cache, [0], (8,))
    with pytest.raises(ValueError, match=r"context is 256.*shorten the prompt"):
        tokens, positions = chain([3], 256 + SCRATCH)
        copy.forward(tokens, positions, None, cache, [0])
