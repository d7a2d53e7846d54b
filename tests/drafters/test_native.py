"""The native draft networks compute what the reference networks compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aquiline.cache import commit
from aquiline.drafters.eagle_network import forward_network, new_draft_cache
from aquiline.drafters.native import NativeNetwork, native_network
from aquiline.targets.rope import RotaryTable
from tests.tiny import head

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("eagle3", {}),
    ("eagle3", {"norm_before_residual": True, "num_layers": 2, "fc_bias": True}),
    ("eagle3", {"norm_before_fc": True, "norm_output": True}),
    ("eagle3", {"fc_norm": True, "features": ("final", 3)}),
    ("eagle", {"fc_bias": True, "num_layers": 2}),
]


@pytest.mark.parametrize(("kind", "changes"), VARIANTS)
@pytest.mark.parametrize("lengths", [[14], [14, 3, 0]])
def test_native_equals_the_reference(kind: str, changes: dict[str, Any], lengths: list[int]) -> None:
    network = head(kind, dtype=torch.float32, **changes).network
    fast = native_network(network)
    assert fast is not None and "native float32" in fast.describe()
    rotary = RotaryTable(network.config.layer.rope, torch.float32)
    generator = torch.Generator().manual_seed(1)
    rows, size = list(range(len(lengths))), len(network.config.features) * 48

    def inputs(width: int) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = torch.randn(len(lengths), width, 48, generator=generator)
        return embedded, torch.randn(len(lengths), width, size, generator=generator)

    context = inputs(max(lengths))
    levels = {width: inputs(width) for width in (1, 5, 32)}

    def outputs(which: Any) -> list[torch.Tensor]:
        cache = new_draft_cache(network, len(rows), 8, 256)

        def run(hidden: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
            arguments = (embedded, hidden, positions, rest[0], cache, rows, rotary, *rest[1:])
            native = isinstance(which, NativeNetwork)
            return which.forward(*arguments) if native else forward_network(which, *arguments)

        embedded, features = context
        positions = torch.arange(max(lengths)).expand(len(rows), -1)
        results = [run(which.fuse(features), embedded, positions, None)]
        commit(cache, _prefixes(lengths), rows)
        for width, (embedded, features) in levels.items():
            hidden = which.fuse(features)
            at = torch.tensor(lengths)[:, None].expand(-1, width)
            # Two levels of a tree: `width` siblings, then one child of each.
            siblings = torch.eye(width, dtype=torch.bool).expand(len(rows), -1, -1)
            first = run(hidden, embedded, at, siblings, 0)
            children = torch.cat((siblings, siblings), dim=2)
            results += [first, run(which.feedback(first), embedded, at + 1, children, width)]
        if kind == "eagle3":
            results += [which.logits(result) for result in results]
        return results

    with torch.no_grad():
        expected = outputs(network)
    for actual, reference in zip(outputs(fast), expected, strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, reference, atol=2e-4, rtol=2e-4)


def _prefixes(lengths: list[int]) -> torch.Tensor:
    index = torch.arange(max(lengths)).expand(len(lengths), -1)
    return index.masked_fill(index >= torch.tensor(lengths)[:, None], -1)


def test_a_dtype_without_kernels_is_left_to_the_reference() -> None:
    assert native_network(head("eagle3").network) is None


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_level_of_a_tree_has_the_bits_of_a_chain(kind: str, dtype: torch.dtype) -> None:
    """Levels with an offset and masks draft what a chain of their nodes drafts, on one thread or two."""
    network = native_network(head(kind, dtype=dtype).network)
    assert network is not None
    rotary = RotaryTable(network.config.layer.rope, dtype)
    generator = torch.Generator().manual_seed(4)
    embedded = torch.randn(1, 6, 48, generator=generator).to(dtype)
    hidden = torch.randn(1, 1, 48, generator=generator).to(dtype)
    filled = new_draft_cache(head(kind, dtype=dtype).network, 1, 128, 256)
    network.forward(torch.randn(1, 70, 48, generator=generator).to(dtype), hidden.expand(-1, 70, -1),
                    torch.arange(70)[None], None, filled, [0], rotary)  # fmt: skip
    commit(filled, torch.arange(70)[None], [0])
    siblings = torch.eye(3, dtype=torch.bool)[None]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        at = torch.full((1, 3), 70)
        first = network.forward(embedded[:, :3], hidden.expand(-1, 3, -1), at, siblings, filled, [0], rotary)
        seen = torch.cat((siblings, siblings), dim=2)
        second = network.forward(embedded[:, 3:], first, at + 1, seen, filled, [0], rotary, 3)
    finally:
        torch.set_num_threads(threads)
    for i in range(3):
        step, at = hidden, torch.tensor([[70]])
        for depth in range(2):
            step = network.forward(
                embedded[:, 3 * depth + i][:, None], step, at + depth, None, filled, [0], rotary, depth
            )
            assert torch.equal(step[:, 0], (first, second)[depth][:, i])
