"""A window changes what an EAGLE head sees and drafts, and no output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aquiline.drafters.drafter import Drafter
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.eagle_network import Eagle3Network, EagleNetwork
from aquiline.drafters.trees import Chain, DynamicTree, StaticTree, TreePolicy
from aquiline.sampling import SamplingParams
from aquiline.targets.rope import RopeConfig
from tests import tiny
from tests.drafters.loop import assert_equal_to_plain, extend, rows_of

YARN = RopeConfig(10000.0, 12, "yarn", {"factor": 4.0, "rope_theta": 10000.0}, 64)
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"kind": "eagle3"},
    "eagle": {"kind": "eagle"},
    "yarn": {"kind": "eagle3", "layer": replace(tiny.head("eagle3").config.layer, rope=YARN)},
}
POLICIES: list[TreePolicy] = [Chain(3), StaticTree(), DynamicTree(num_nodes=14, depth=3, top_k=4)]
TEXT = torch.randint(0, tiny.VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()


TREE = DynamicTree(num_nodes=14, depth=3, top_k=4)


def drafter(name: str, window: int | None, policy: TreePolicy | None = None, *, packed: bool = False) -> EagleDrafter:
    """A drafter in float64, or a packed one in float32."""
    dtype = torch.float32 if packed else torch.float64
    made = replace(tiny.head(**HEADS[name], dtype=dtype), window=window)
    return EagleDrafter(made, tiny.decoder("llama", dtype), policy or TREE, packed=packed)


def features(made: EagleDrafter, count: int) -> Tensor:
    width = 48 * len(made.head.config.features)
    given = torch.randn(1, count, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return given.to(made.target.dtype)


def fed(made: EagleDrafter, pieces: list[int]) -> Any:
    """A state of two slots; slot 0 received `TEXT` in pieces that end there, with a draft after each."""
    state, given, begin = made.new_state(2, 64), features(made, len(TEXT)), 0
    for end in pieces:
        extend(made, state, 0, TEXT[: end + 1], given[:, begin:end])
        made.propose(rows_of(TEXT[: end + 1]), state)
        begin = end
    return state


def assert_same_drafts(made: EagleDrafter, state: Any, end: int, seen: int, *, slot: int = 0) -> None:
    """The drafts after position `end` are those of a head without a window that sees the last `seen` positions."""
    packed = not isinstance(made._network, EagleNetwork | Eagle3Network)
    other = EagleDrafter(replace(made.head, window=None), made.target, made.policy, packed=packed)
    fresh, text = other.new_state(1, 64), TEXT[end - seen : end + 1]
    extend(other, fresh, 0, text, features(made, len(TEXT))[:, end - seen : end])
    expected = other.propose(rows_of(text), fresh)
    found = made.propose(rows_of(TEXT[: end + 1], slots=[slot]), state)
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.parents, expected.parents)
    assert found.log_probs is not None and expected.log_probs is not None
    assert torch.allclose(found.log_probs, expected.log_probs, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    ("pieces", "seen"),
    [
        ([16], 16),  # twice the window: not yet
        ([17], 8),  # one position more
        ([39], 8),  # a long prompt at once
        ([10, 14, 18], 8),  # in the middle of what is cached
        ([6, 16, 30], 8),  # everything that is cached, and a part of what waits
        ([10, 18, 21, 26, 27, 31], 12),  # again and again: 8 at 18, 16 at 26, 8 at 27
    ],
)
def test_the_head_sees_the_end_of_a_long_text(name: str, pieces: list[int], seen: int) -> None:
    made = drafter(name, 8)
    assert_same_drafts(made, fed(made, pieces), pieces[-1], seen)


@pytest.mark.parametrize("policy", [Chain(3), TREE], ids=["chain", "dynamic"])
def test_the_kernels_see_the_end_of_a_long_text(policy: TreePolicy) -> None:
    made = drafter("eagle3", 8, policy, packed=True)
    assert_same_drafts(made, fed(made, [10, 18, 21, 26]), 26, 16)
    assert_same_drafts(made, fed(made, [10, 18, 21, 26, 27]), 27, 8)


def test_what_a_reset_or_a_copy_keeps_of_a_window() -> None:
    made = drafter("eagle3", 8)
    state = fed(made, [10, 18])  # forgot 10, holds 8
    made.copy(0, 1, 16 + 1, state)
    given = features(made, len(TEXT))
    extend(made, state, 1, TEXT[:20], given[:, 16:19])
    assert_same_drafts(made, state, 19, 9, slot=1)
    made.reset(0, 14 + 1, state)
    extend(made, state, 0, TEXT[:17], given[:, 14:16])
    assert_same_drafts(made, state, 16, 6)
    made.reset(0, 3 + 1, state)  # before all that it remembers
    extend(made, state, 0, TEXT[:12], given[:, 3:11])
    assert_same_drafts(made, state, 11, 8)
    made.reset(0, 0, state)
    extend(made, state, 0, TEXT[:6], given[:, :5])
    assert_same_drafts(made, state, 5, 5)


@pytest.mark.oracle
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", POLICIES, ids=["chain", "static", "dynamic"])
def test_a_window_changes_no_output(policy: TreePolicy, temperature: float) -> None:
    made: Drafter = drafter("eagle3", 6, policy)
    target = tiny.decoder("llama")
    assert_equal_to_plain(target, made, tiny.prompts(3, seed=2), SamplingParams(temperature=temperature))
