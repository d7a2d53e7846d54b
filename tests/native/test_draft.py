"""Trees in one call are the trees of calls level by level."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.prices import Costs, Prices
from aquiline.drafters.trees import Chain, DynamicTree
from aquiline.native.draft import Growth
from aquiline.native.library import Race
from aquiline.sampling import SamplingParams, TokenChooser
from aquiline.targets.native import NativeDecoder, native
from aquiline.tree import is_chain
from tests.drafters.loop import extend, rows_of
from tests.tiny import decoder, head

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("eagle3", {}),
    ("eagle3", {"norm_output": True, "num_layers": 2}),
    ("eagle", {"fc_bias": True}),
]


GREEDY = SamplingParams()
SETTINGS = {
    "greedy": (GREEDY,) * 3,
    "sampled": (SamplingParams(temperature=90.0), SamplingParams(temperature=40.0, top_k=5), GREEDY),
    "filtered": (
        SamplingParams(temperature=70.0, top_p=0.9),
        SamplingParams(temperature=90.0, min_p=0.05),
        SamplingParams(temperature=60.0, top_k=30, top_p=0.95),
    ),
}
"""By row. The tiny models' logits are in the hundreds, and so are temperatures that matter."""


def made(
    kind: str, dtype: torch.dtype, policy: Chain | DynamicTree, changes: dict[str, Any]
) -> tuple[EagleDrafter, NativeDecoder]:
    target = native(decoder("llama", dtype))
    assert target is not None
    drafter = EagleDrafter(head(kind, dtype=dtype, **changes), target, policy, packed=True)
    assert drafter._draft is not None
    return drafter, target


POLICIES: list[Chain | DynamicTree | None] = [
    Chain(1), Chain(6), Chain(6, 1e-4), DynamicTree(8, 3, 2), DynamicTree(12, 4, 4), DynamicTree(40, 5, 8, 1e-6),
    DynamicTree(60, 2, 16), None,
]  # fmt: skip
"""None: under prices."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "changes"), VARIANTS)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_tree_in_one_call_equals_its_levels(
    kind: str,
    changes: dict[str, Any],
    dtype: torch.dtype,
    policy: Chain | DynamicTree | None,
    settings: Sequence[SamplingParams],
) -> None:
    """With prices, which let a level follow while the rows' probabilities sum to enough, a chain has siblings."""
    priced, policy = policy is None, policy or Chain()
    drafter, target = made(kind, dtype, policy, changes)
    generator = torch.Generator().manual_seed(3)
    size = len(drafter.needs.features) * target.shape.hidden_size
    texts = [torch.randint(0, 90, (n,), generator=generator).tolist() for n in (9, 30, 2)]
    features = [torch.randn(1, len(text) - 1, size, generator=generator).to(dtype) for text in texts]
    choosers = [TokenChooser(params, seed, 2) for seed, params in enumerate(settings)]
    rows = replace(rows_of(*texts), choosers=choosers)
    if priced:
        rows = replace(rows, prices=Prices(1.0, Costs([{"tokens": n, "seconds": 1e-4 * n} for n in (1, 2)]), [0.5]))
        drafter._paces = {
            sample: deque(maxlen=0) for sample in (False, True)
        }  # what a level takes must not differ between the two
    trees = []
    for fast in (drafter._draft, None):
        for threads in (1, 2):
            drafter._draft = fast
            before = torch.get_num_threads()
            try:
                torch.set_num_threads(threads)
                state = drafter.new_state(3, 8)
                for slot, (text, given) in enumerate(zip(texts, features, strict=True)):
                    extend(drafter, state, slot, text, given)
                trees.append(drafter.propose(rows, state))
                # A second draft sees none of the first.
                trees.append(drafter.propose(rows, state))
            finally:
                torch.set_num_threads(before)
    first = trees[0]
    assert first.size > (policy.depth if priced else 1)
    if isinstance(policy, DynamicTree):
        assert not is_chain(first)
    for other in trees[1:]:
        assert torch.equal(other.tokens, first.tokens) and torch.equal(other.num_nodes, first.num_nodes)
        assert torch.equal(other.parents, first.parents)
        # The tiny models' logits are in the hundreds: differences of them lose what one call keeps.
        torch.testing.assert_close(other.log_probs, first.log_probs, atol=5e-4, rtol=1e-5)
    assert torch.equal(trees[0].log_probs, trees[2].log_probs), "threads"


def test_what_does_not_fit_is_an_error() -> None:
    drafter, _ = made("eagle3", torch.float32, Chain(3), {})
    draft, network = drafter._draft, drafter._network
    assert draft is not None
    state = drafter.new_state(1, 8)
    call = ([1], state.logits, state.hidden, state.cache, [0])
    angles = network._angles.upto(9)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="0 levels with 0 floors; allowed: at least one"):
        Growth(0)
    with pytest.raises(ValueError, match="3 levels with 1 floors; allowed"):
        Growth(3, floors=[0.5])
    with pytest.raises(ValueError, match=r"kept 17.*≤ kept ≤ 16"):
        Growth(2, 17)
    with pytest.raises(ValueError, match=r"width is 3, kept 2"):
        Growth(2, 2, 3)
    with pytest.raises(ValueError, match="2 races for 1 rows"):
        draft.draft(*call, angles, Growth(1), [Race(), Race()])
    with pytest.raises(ValueError, match="1 roots and 0 races for 2 rows"):
        draft.draft(*call[:4], [0, 1], angles, Growth(3))
    with pytest.raises(ValueError, match=r"hidden are .*torch.float64"):
        draft.draft(*call[:2], state.hidden.double(), *call[3:], angles, Growth(3))
    with pytest.raises(ValueError, match="kept is 16; allowed: 1 to 9"):
        Growth(1, 16).check_vocabulary(9)
    with pytest.raises(ValueError, match=r"slot|position"):
        draft.draft(*call, network._angles.upto(100), Growth(3000))  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="slot"):
        draft.draft(*call, network._angles.upto(100), Growth(20, 8, 8))  # type: ignore[union-attr]
    wrong = replace(draft, draft_to_target=None if draft.draft_to_target is None else draft.draft_to_target + 10**6)
    if wrong.draft_to_target is not None:
        with pytest.raises(ValueError, match="token 1000"):
            wrong.draft(*call, network._angles.upto(100), Growth(2))  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="embedding"):
        replace(draft, embedding=draft.embedding.double())
