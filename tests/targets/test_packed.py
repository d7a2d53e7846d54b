"""Packed linears compute what the linears of the reference path compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aquiline.drafters.eagle_network import Network, forward_network, new_draft_cache
from aquiline.targets.decoder import Decoder
from aquiline.targets.packed import packed
from aquiline.targets.rope import RotaryTable
from aquiline.targets.target import TargetInput
from tests.targets.native_targets import ancestors_of, assert_close, chain, fill
from tests.tiny import FAMILIES, decoder, head


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [[17], [30, 3, 30]])
def test_packed_equals_the_reference(family: str, lengths: list[int]) -> None:
    reference = decoder(family, torch.float32)
    copy = packed(reference)
    assert copy is not None, "CI machines have these kernels"
    rows, caches = list(range(len(lengths))), [fill(target, lengths) for target in (copy, reference)]
    seen, depth = ancestors_of([-1, 0, 0, 1, 1, 2])
    positions = torch.tensor(lengths)[:, None] + depth
    tokens, _ = chain(lengths, len(depth))
    call = (tokens, positions, seen.expand(len(lengths), -1, -1))
    ours, theirs = (
        target.forward(TargetInput(*call, cache, rows, (0, 2, "final")))
        for target, cache in zip((copy, reference), caches, strict=True)
    )
    assert_close(ours, theirs, 1e-4)


def test_bfloat16_stays_within_the_noise_of_the_reference() -> None:
    reference = decoder("qwen3", torch.bfloat16)
    copy = packed(reference)
    if copy is None:
        pytest.skip("this processor has no fast bfloat16 kernels")
    tokens, positions = chain([30], 8)
    ours, theirs = (
        t.forward(TargetInput(tokens, positions, None, fill(t, [30]), [0])).logits for t in (copy, reference)
    )
    exact = Decoder(reference.config).requires_grad_(False)
    exact.load_state_dict(reference.state_dict())
    truth = exact.forward(TargetInput(tokens, positions, None, fill(exact, [30]), [0])).logits
    assert (ours - truth).square().mean() <= 1.5 * (theirs - truth).square().mean()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("eagle3", {}), ("eagle3", {"fc_norm": True, "num_layers": 2, "fc_bias": True}), ("eagle", {"fc_bias": True})],
)
def test_packed_draft_networks_equal_the_reference(kind: str, changes: dict[str, Any]) -> None:
    network = head(kind, dtype=torch.float32, **changes).network
    copy = packed(network)
    assert copy is not None
    rotary = RotaryTable(network.config.layer.rope, torch.float32)
    generator = torch.Generator().manual_seed(1)
    embedded = torch.randn(1, 6, 48, generator=generator)
    features = torch.randn(1, 6, 48 * len(network.config.features), generator=generator)

    def stream(which: Network) -> torch.Tensor:
        cache = new_draft_cache(network, 1, 8, 64)
        return forward_network(which, embedded, which.fuse(features), torch.arange(6)[None], None, cache, [0], rotary)

    torch.testing.assert_close(stream(copy), stream(network), atol=2e-4, rtol=2e-4)


def test_a_dtype_without_kernels_is_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed(decoder("llama")) is None
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert packed(decoder("llama", torch.float32)) is None


def test_all_but_the_linears_is_shared() -> None:
    reference = decoder("llama-bias-tied", torch.float32)
    copy = packed(reference)
    assert copy is not None
    shared = {parameter.data_ptr() for parameter in copy.parameters()}
    linears = {m.weight.data_ptr() for m in reference.modules() if isinstance(m, torch.nn.Linear)}
    embedding = reference.embed_tokens.weight.data_ptr()
    assert embedding in shared and not shared & (linears - {embedding})
    assert len(list(reference.parameters())) > len(list(copy.parameters())), "the original keeps its linears"
