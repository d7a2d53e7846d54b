"""The forward of few kernels, as GPUs run it: equal to the reference within rounding, and few indeed."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from aquiline.cache import commit
from aquiline.drafters.eagle_network import forward_network, head_on, new_draft_cache
from aquiline.targets.decoder import Decoder
from aquiline.targets.layers import Attention, GatedMLP
from aquiline.targets.rope import RotaryTable
from aquiline.targets.target import TargetInput
from aquiline.tree import ancestors, depths
from tests import tiny
from tests.pretend_device import DEVICE, pretended_device

PARENTS = torch.tensor([[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, -1, -1]])


def joined(family: str, dtype: torch.dtype = torch.float64) -> Decoder:
    target = copy.deepcopy(tiny.decoder(family, dtype))
    target.join()
    return target


def tree_logits(target: Decoder, rows: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Logits of two trees after prompts of given lengths, in given rows of a cache."""
    cache = target.new_cache(4, 64)
    for row, length in zip(rows, lengths, strict=True):
        ids = torch.arange(3 + row, 3 + row + length)[None]
        target.forward(TargetInput(ids, torch.arange(length)[None], None, cache, [row]))
        commit(cache, torch.arange(length)[None], [row])
    tokens = torch.arange(12).view(2, 6) + 40
    positions = torch.tensor(lengths)[:, None] + depths(PARENTS)
    return target.forward(TargetInput(tokens, positions, ancestors(PARENTS), cache, rows, (2, "final"))).logits


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("rows", [(1, 2), (3, 1)], ids=["neighbours", "apart"])
@pytest.mark.parametrize("lengths", [(17, 17), (5, 18)], ids=["even", "ragged"])
def test_a_joined_decoder_equals_the_reference(family: str, rows: Sequence[int], lengths: Sequence[int]) -> None:
    expected = tree_logits(tiny.decoder(family), rows, lengths)
    found = tree_logits(joined(family), rows, lengths)
    assert not torch.equal(found, expected), "the joined form did not run"
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_joined_weights_are_stored_once_and_follow_their_parts() -> None:
    target = joined("qwen2")
    attention = target.layers[0].self_attn
    product = attention.joined.product.keywords
    assert attention.q_proj.weight.untyped_storage().data_ptr() == product["weight"].untyped_storage().data_ptr()
    assert target.state_dict().keys() == tiny.decoder("qwen2").state_dict().keys()
    attention.v_proj.bias.data += 1
    assert torch.equal(product["bias"][-24:], attention.v_proj.bias)
    assert target.to(torch.float32).layers[0].self_attn.joined is None


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_joined_head_equals_the_reference(kind: str) -> None:
    streams = []
    for fused in (False, True):
        head = tiny.head(kind)
        if fused:
            for module in head.network.modules():
                if isinstance(module, Attention | GatedMLP):
                    module.join()
        cache = new_draft_cache(head.network, 2, 64, 64)
        hidden = torch.sin(torch.arange(2 * 6 * 48, dtype=torch.float64)).view(2, 6, 48)
        rotary = RotaryTable(head.config.layer.rope, torch.float64)
        arguments = (hidden.flip(1), hidden, depths(PARENTS), ancestors(PARENTS), cache, [0, 1], rotary)
        streams.append(forward_network(head.network, *arguments))
    torch.testing.assert_close(streams[1], streams[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("family", "width", "limit"), [("llama", 1, 16), ("llama", 6, 18), ("qwen3", 6, 20)])
def test_a_layer_takes_few_kernels(family: str, width: int, limit: int) -> None:
    with torch.inference_mode(), pretended_device() as counts:
        target = copy.deepcopy(tiny.decoder(family, torch.float32)).to(DEVICE)
        target.join()
        cache = target.new_cache(1, 64)
        ids = torch.arange(width, device=DEVICE)[None]
        seen = ancestors(PARENTS[:1]).to(DEVICE) if width > 1 else None
        totals = []
        for layers in (7, 1):
            target.layers = target.layers[:layers]
            counts.clear()
            target.forward(TargetInput(ids, ids, seen, cache, [0]))
            totals.append(counts.kernels.total())
        assert (totals[0] - totals[1]) / 6 <= limit
        assert head_on(tiny.head("eagle3", dtype=torch.float32), DEVICE).network.fc.weight.device == DEVICE


@pytest.mark.parametrize("fused", [False, True], ids=["reference", "joined"])
def test_a_forward_is_one_graph(fused: bool) -> None:
    target = joined("llama", torch.float32) if fused else tiny.decoder("llama", torch.float32)
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        found = torch._dynamo.explain(target.forward)(
            TargetInput(tokens, depths(PARENTS[:1]), ancestors(PARENTS[:1]), target.new_cache(1, 64), [0])
        )
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons
