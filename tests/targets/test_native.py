"""The native decoder computes what the reference decoder computes, with the same bits however it is asked."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from aquiline.cache import SCRATCH, KVCache, commit
from aquiline.native.codes import WeightFormat, quantise
from aquiline.targets.decoder import Decoder
from aquiline.targets.native import NativeDecoder, native
from aquiline.targets.target import TargetInput
from tests.targets.native_targets import (
    TOLERANCE,
    ancestors_of,
    assert_best,
    assert_close,
    chain,
    copy_of,
    duplicate,
    fill,
    random_decoder,
    threads,
)
from tests.tiny import FAMILIES, VOCAB, decoder

# -- the same as the reference -----------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_native_equals_the_reference_in_every_family(family: str) -> None:
    reference = decoder(family, torch.float32)
    copy = copy_of(reference)
    for lengths in ([17], [30, 3, 30]):
        ours, theirs = fill(copy, lengths), fill(reference, lengths)
        rows = list(range(len(lengths)))
        for width in (1, 2, 7, 40):
            tokens, positions = chain(lengths, width)
            call = (tokens, positions, None)
            features = (0, 2, 7, "final")
            # The tiny models' streams grow to tens: their float32 noise is several times 1e-5.
            expected = reference.forward(TargetInput(*call, theirs, rows, features))
            assert_close(copy.forward(TargetInput(*call, ours, rows, features)), expected, 10 * TOLERANCE)


SHAPES: list[tuple[tuple[int, int], int, int, int, dict[str, Any]]] = [
    ((4, 2), 16, 64, 96, {}),
    ((3, 3), 32, 96, 128, {"qkv_bias": True, "o_bias": True, "mlp_bias": True}),
    ((6, 2), 48, 80, 104, {"qk_norm": True}),
    ((9, 3), 64, 96, 70, {"windows": (None, 7, 40)}),
    ((2, 1), 80, 50, 33, {"activation": "gelu_pytorch_tanh"}),
    ((4, 1), 96, 72, 40, {"rotary_dim": 24}),
    ((2, 2), 112, 40, 200, {"qk_norm": True, "rotary_dim": 56, "qkv_bias": True}),
    ((8, 2), 128, 64, 64, {"windows": (5, None, 5), "vocab": 130}),
    ((5, 1), 6, 37, 51, {"windows": (1, 2, 3), "vocab": 113}),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_size_and_switch(shape: Any) -> None:
    heads, dim, hidden, inner, changes = shape
    reference = random_decoder(heads, dim, hidden, inner, **changes)
    copy = copy_of(reference)
    lengths, rows = [33, 0, 70], [2, 0, 1]
    ours, theirs = fill(copy, lengths, rows=rows), fill(reference, lengths, rows=rows)
    torch.testing.assert_close(ours.key_block, theirs.key_block, atol=1e-4, rtol=1e-4)
    for parents in ([-1], [-1, 0, 0, 1, 1, 2, 3], [max(-1, (i - 1) // 2) for i in range(45)]):
        seen, depth = ancestors_of(parents)
        tokens, _ = chain(lengths, len(parents))
        positions = torch.tensor(lengths)[:, None] + depth
        mask = seen.expand(3, -1, -1)
        call = (tokens, positions, mask)
        features = (0, 1, 3, "final")
        assert_close(
            copy.forward(TargetInput(*call, ours, rows, features)),
            reference.forward(TargetInput(*call, theirs, rows, features)),
        )


def test_long_contexts() -> None:
    reference = random_decoder((4, 2), 32, 64, 64, windows=(None, 300, None))
    copy = copy_of(reference)
    ours, theirs = fill(copy, [1100]), fill(reference, [1100])
    tokens, positions = chain([1100], 9)
    assert_close(
        copy.forward(TargetInput(tokens, positions, None, ours, [0])),
        reference.forward(TargetInput(tokens, positions, None, theirs, [0])),
    )


def test_a_node_may_see_later_nodes() -> None:
    reference = decoder("llama", torch.float32)
    copy = copy_of(reference)
    ours, theirs = fill(copy, [60]), fill(reference, [60])
    tokens, positions = chain([60], 8)
    everyone = torch.ones(1, 8, 8, dtype=torch.bool)
    expected = reference.forward(TargetInput(tokens, positions, everyone, theirs, [0]))
    assert_close(copy.forward(TargetInput(tokens, positions, everyone, ours, [0])), expected, 10 * TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_bfloat16_is_no_further_from_float32_than_the_reference(family: str) -> None:
    reference = decoder(family, torch.bfloat16)
    exact = Decoder(reference.config).requires_grad_(False)
    exact.load_state_dict(reference.state_dict())
    lengths = [30, 12]
    tokens, positions = chain(lengths, 8)
    outputs = [
        target.forward(TargetInput(tokens, positions, None, fill(target, lengths), [0, 1])).logits
        for target in (copy_of(reference), reference, exact)
    ]
    error, noise = ((o - outputs[2]).square().mean().sqrt() for o in outputs[:2])
    assert error <= noise


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("shape", [((6, 2), 64, 96, 130), ((3, 3), 32, 100, 70), ((4, 1), 16, 72, 200)])
def test_integer_weights_compute_what_they_dequantise_to(form: WeightFormat, shape: Any) -> None:
    reference = random_decoder(*shape, windows=(None, 25, None), qk_norm=True, qkv_bias=True, mlp_bias=True)
    copy = copy_of(reference, form)
    for module in reference.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(quantise(module.weight, form).dequantise())
    seen, depth = ancestors_of([-1, 0, 0, 1, 1, 2, 3])
    tokens, _ = chain([40, 9], 7)
    call = (tokens, torch.tensor([40, 9])[:, None] + depth, seen.expand(2, -1, -1))
    ours, theirs = fill(copy, [40, 9]), fill(reference, [40, 9])
    features = (0, 1, 3, "final")
    # Activations have sixteen bits.
    assert_close(
        copy.forward(TargetInput(*call, ours, [0, 1], features)),
        reference.forward(TargetInput(*call, theirs, [0, 1], features)),
        5e-4,
    )


# -- the same bits -----------------------------------------------------------------------------

BIT_MODELS = {
    "grouped": lambda: random_decoder((6, 2), 64, 96, 128, torch.bfloat16),
    "windowed": lambda: random_decoder((4, 4), 48, 80, 72, torch.bfloat16, windows=(None, 20, 5), qk_norm=True),
    "float32": lambda: random_decoder((4, 2), 32, 64, 96, torch.float32, windows=(None, 33, None), qkv_bias=True),
    "int8": lambda: random_decoder((6, 2), 64, 96, 128, torch.bfloat16, windows=(None, 33, None), qkv_bias=True),
    "int4": lambda: random_decoder((4, 2), 48, 160, 72, torch.bfloat16, qk_norm=True),
}
_made: dict[str, NativeDecoder] = {}


def bit_model(name: str) -> NativeDecoder:
    if name not in _made:
        forms: dict[str, WeightFormat] = {"int8": "int8", "int4": "int4"}
        _made[name] = copy_of(BIT_MODELS[name](), forms.get(name))
    return _made[name]


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(1, 40))
    return [-1] + [draw(st.integers(max(0, i - draw(st.integers(1, 6))), i - 1)) for i in range(1, size)]


@settings(max_examples=40, deadline=None)
@given(
    model=st.sampled_from(sorted(BIT_MODELS)),
    context=st.integers(0, 150),
    chunk=st.integers(1, 150),
    parents=trees(),
    others=st.lists(st.integers(0, 90), max_size=2),
    count=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_bits_do_not_depend_on_what_else_is_forwarded(
    model: str, context: int, chunk: int, parents: list[int], others: list[int], count: int, seed: int
) -> None:
    """One by one; in chunks; as a tree, beside other rows, on two threads: the same logits and keys."""
    target, generator = bit_model(model), torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, VOCAB, (1, context), generator=generator)
    seen, depth = ancestors_of(parents)
    nodes = torch.randint(0, VOCAB, (1 + len(others), len(parents)), generator=generator)

    def feed(cache: KVCache, tokens: Tensor, row: int, size: int) -> list[Tensor]:
        logits = []
        for start in range(0, tokens.shape[1], size):
            piece = tokens[:, start : start + size]
            positions = int(cache.lengths[row]) + torch.arange(piece.shape[1])[None]
            logits.append(target.forward(TargetInput(piece, positions, None, cache, [row], ("final",))).logits[0])
            commit(cache, torch.arange(piece.shape[1])[None], [row])
        return logits

    alone = target.new_cache(1, 8)
    one_by_one = feed(alone, prompt, 0, 1)
    together = target.new_cache(3, 8)
    with threads(count):
        chunked = feed(together, prompt, 1, chunk)
        for row, length in zip((0, 2), others, strict=False):
            feed(together, prompt.new_tensor([[i % VOCAB for i in range(length)]]), row, 64)
        rows = [1, 0, 2][: 1 + len(others)]
        positions = together.lengths[rows][:, None] + depth
        mask = seen.expand(len(rows), -1, -1)
        logits = target.forward(TargetInput(nodes, positions, mask, together, rows)).logits[0]
    if context:
        assert torch.equal(torch.cat(chunked), torch.cat(one_by_one))
        assert torch.equal(together.key_block[:, 1, :, :context], alone.key_block[:, 0, :, :context])
    for leaf in {len(parents) - 1, len(parents) // 2}:
        path = [i for i in range(len(parents)) if seen[leaf, i]]
        expected = torch.cat(feed(duplicate(alone), nodes[:1, path], 0, 1))
        assert torch.equal(logits[path], expected)


def test_committed_paths_continue_with_the_same_bits() -> None:
    target = bit_model("grouped")
    parents = [-1, 0, 0, 1, 2, 2, 4, 6, 6]
    seen, depth = ancestors_of(parents)
    tokens, _ = chain([50], len(parents))
    tree, plain = fill(target, [50]), fill(target, [50])
    target.forward(TargetInput(tokens, 50 + depth[None], seen[None], tree, [0]))
    path = [0, 2, 4, 6, 8]
    commit(tree, torch.tensor([path]), [0])
    for i, node in enumerate(path):
        target.forward(TargetInput(tokens[:, node : node + 1], torch.tensor([[50 + i]]), None, plain, [0]))
        commit(plain, torch.tensor([[0]]), [0])
    outputs = [
        target.forward(TargetInput(tokens[:, :1], torch.tensor([[55]]), None, c, [0])).logits for c in (tree, plain)
    ]
    assert torch.equal(*outputs)
    assert torch.equal(tree.value_block[..., :55, :], plain.value_block[..., :55, :])


def test_final_features_project_to_the_same_logits() -> None:
    for name in BIT_MODELS:
        target = bit_model(name)
        tokens, positions = chain([6], 5)
        out = target.forward(TargetInput(tokens, positions, None, fill(target, [6]), [0], ("final",)))
        assert out.features is not None
        if target.form:
            continue  # reads the float32 rows that the features are rounded from
        exact = target.dtype == torch.float32 or target.describe().endswith(("(AMX)", "with bfloat16)"))
        torch.testing.assert_close(target.project(out.features), out.logits, atol=0 if exact else 0.1, rtol=0)


def test_two_callers_at_once_get_the_same_bits() -> None:
    target = bit_model("grouped")
    tokens, positions = chain([90], 20)
    caches = [fill(target, [90]) for _ in range(4)]
    expected = target.forward(TargetInput(tokens, positions, None, caches[0], [0])).logits

    def call(cache: KVCache) -> bool:
        return all(
            torch.equal(target.forward(TargetInput(tokens, positions, None, cache, [0])).logits, expected)
            for _ in range(20)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, caches))


# -- the contract of a target ------------------------------------------------------------------


def test_a_forward_is_idempotent_and_writes_no_other_slot() -> None:
    copy = copy_of(decoder("llama", torch.float32))
    cache = fill(copy, [12, 7, 4])
    before = cache.key_block.clone()
    tokens, positions = chain([7, 4], 5)
    first = copy.forward(TargetInput(tokens, positions, None, cache, [1, 2], (2,)))
    kept, features = first.logits.clone(), first.features
    assert features is not None
    features = features.clone()
    assert torch.equal(copy.forward(TargetInput(tokens, positions, None, cache, [1, 2])).logits, kept)
    assert cache.lengths.tolist() == [12, 7, 4]
    changed = (cache.key_block != before).any(-1).any(2).any(0)
    expected = torch.zeros_like(changed)
    expected[1, 7:12] = expected[2, 4:9] = True
    assert torch.equal(changed, expected)
    copy.forward(TargetInput((tokens + 1) % VOCAB, positions, None, cache, [1, 2], (2,)))
    assert torch.equal(first.logits, kept)
    assert first.features is not None and torch.equal(first.features, features)


def test_logits_at_picks_positions() -> None:
    copy = copy_of(decoder("llama", torch.float32))
    cache = fill(copy, [6, 9])
    tokens, positions = chain([6, 9], 5)
    every = copy.forward(TargetInput(tokens, positions, None, cache, [0, 1])).logits
    at = torch.tensor([[4, 0, 0, 1, 2, 3], [1, 1, 4, 0, 3, 2]])
    some = copy.forward(TargetInput(tokens, positions, None, cache, [0, 1], logits_at=at)).logits
    assert torch.equal(some, torch.stack((every[0, at[0]], every[1, at[1]])))
    none = copy.forward(
        TargetInput(tokens, positions, None, cache, [0, 1], logits_at=torch.empty(2, 0, dtype=torch.int64))
    )
    assert none.logits.shape == (2, 0, VOCAB)


def test_strided_inputs_are_taken() -> None:
    copy = copy_of(decoder("llama", torch.float32))
    cache = fill(copy, [6])
    tokens, _ = chain([6], 10)
    seen, depth = ancestors_of([-1, 0, 0, 1, 1])
    plain = copy.forward(TargetInput(tokens[:, ::2].contiguous(), 6 + depth[None], seen[None], cache, [0])).logits
    strided = copy.forward(
        TargetInput(tokens[:, ::2], (6 + depth[None]).T.contiguous().T, seen.T.contiguous().T[None], cache, [0])
    )
    assert torch.equal(strided.logits, plain)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("tokens", {"tokens": torch.tensor([[1, VOCAB]])}, f"token {VOCAB}; allowed: 0 to {VOCAB - 1}"),
    ("negative", {"tokens": torch.tensor([[1, -1]])}, "token -1"),
    ("dtype", {"tokens": torch.tensor([[1, 2]], dtype=torch.int32)}, "torch.int32.*torch.int64"),
    ("width", {"positions": torch.tensor([[3, 4, 5]])}, r"tokens.*\(1, 2\).*\(1, 3\)"),
    ("position", {"positions": torch.tensor([[3, 5000]])}, "position 5000"),
    ("mask", {"ancestors": torch.ones(1, 2, 3, dtype=torch.bool)}, r"ancestors.*\(1, 2, 3\).*\(1, 2, 2\)"),
    ("float mask", {"ancestors": torch.ones(1, 2, 2)}, "ancestors.*torch.float32.*torch.bool"),
    ("rows", {"rows": [0, 0]}, "rows are .*1 distinct"),
    ("asked", {"logits_at": torch.tensor([[2]])}, "logits position 2; allowed: 0 to 1"),
    ("asked shape", {"logits_at": torch.tensor([1])}, r"logits_at.*\(1,\)"),
    ("feature", {"features": (8,)}, "unknown target feature 8"),
]


@pytest.mark.parametrize(("changes", "message"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_what_does_not_fit_is_an_error(changes: dict[str, Any], message: str) -> None:
    copy = copy_of(decoder("llama", torch.float32))
    arguments: dict[str, Any] = {
        "tokens": torch.tensor([[1, 2]]),
        "positions": torch.tensor([[3, 4]]),
        "ancestors": None,
        "cache": fill(copy, [3]),
        "rows": [0],
    }
    with pytest.raises(ValueError, match=message):
        copy.forward(TargetInput(**(arguments | changes)))
    copy.forward(TargetInput(**arguments))


def test_foreign_caches_and_full_contexts_are_errors() -> None:
    copy = copy_of(decoder("llama", torch.float32))
    tokens, positions = chain([0], 2)
    other = copy_of(decoder("llama", torch.bfloat16)).new_cache(1, 8)
    with pytest.raises(ValueError, match=r"key block.*bfloat16.*new_cache"):
        copy.forward(TargetInput(tokens, positions, None, other, [0]))
    strided = copy.new_cache(1, 64)
    strided.value_block = strided.value_block.transpose(3, 4).contiguous().transpose(3, 4)
    with pytest.raises(ValueError, match=r"value block.*strides"):
        copy.forward(TargetInput(tokens, positions, None, strided, [0]))
    with pytest.raises(IndexError, match="out of range"):
        copy.forward(TargetInput(tokens, positions, None, copy.new_cache(1, 8), [1]))
    with pytest.raises(ValueError, match="cache row -1"):
        copy.forward(TargetInput(tokens, positions, None, copy.new_cache(1, 8), [-1]))
    with pytest.raises(ValueError, match="context is 256"):
        tokens, positions = chain([3], 256 + SCRATCH)
        copy.forward(TargetInput(tokens, positions, None, fill(copy, [3]), [0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [32, 48])
def test_nan_stays_nan_and_in_its_row(dtype: torch.dtype, dim: int) -> None:
    reference = random_decoder((4, 2), dim, 64, 64, dtype)
    reference.embed_tokens.weight[5] = float("nan")
    copy = copy_of(reference)
    cache = copy.new_cache(2, 8)
    tokens = torch.tensor([[1, 2, 3], [1, 5, 3]])
    found = copy.forward(TargetInput(tokens, torch.arange(3).expand(2, -1), None, cache, [0, 1]))
    out = found.logits
    assert out[0].isfinite().all()
    assert out[1, 1:].isnan().all()
    assert_best(found)
    # The rejected slots hold NaN; a later forward does not see it.
    clean = torch.tensor([[1, 2], [1, 2]])
    out = copy.forward(TargetInput(clean, torch.arange(2).expand(2, -1), None, cache, [0, 1])).logits
    assert torch.equal(out[0], out[1])


@pytest.mark.parametrize("broken", [None, 3, 90])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_best_token_is_the_first_of_equals(count: int, broken: int | None) -> None:
    """Each token has a twin at the other end of the vocabulary, in another thread's part."""
    reference = random_decoder((4, 2), 32, 64, 64, vocab=100)
    weight = reference.lm_head.weight
    weight[50:] = weight[:50].flip(0)
    if broken is not None:
        weight[broken] = float("nan")
    copy, (tokens, positions) = copy_of(reference), chain([0], 40)
    with threads(count):
        out = copy.forward(TargetInput(tokens % 100, positions, None, copy.new_cache(1, 64), [0]))
    assert_best(out)
    assert out.best is not None and (out.best < 50).all()
    assert broken is None or (out.best == -1).all()


def test_a_dtype_without_kernels_is_left_to_the_reference() -> None:
    assert native(decoder("llama")) is None


def test_the_originals_weights_are_not_kept_alive() -> None:
    def living(places: set[int]) -> int:
        # Exact types: a fake tensor of a compilation elsewhere has no address.
        return sum(type(each) in (Tensor, Parameter) and each.data_ptr() in places for each in gc.get_objects())

    reference = random_decoder((4, 2), 32, 64, 64)
    copy = copy_of(reference)
    originals = {p.data_ptr() for p in reference.parameters()} - {reference.embed_tokens.weight.data_ptr()}
    assert living(originals) >= len(originals)
    del reference
    gc.collect()
    assert copy.embedding.numel() and not living(originals)
