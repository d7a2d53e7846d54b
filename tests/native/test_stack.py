"""Arguments of wrong sizes, dtypes, strides and values: an error in Python or a correct answer, never a crash."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aquiline.drafters.eagle_network import new_draft_cache
from aquiline.drafters.native import native_network
from aquiline.targets.rope import RotaryTable
from tests.targets.native_targets import copy_of, fill
from tests.tiny import VOCAB, decoder, head

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool]


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, Any]:
    kind = draw(st.sampled_from(["shape", "dtype", "strides", "value", "empty", "meta"]))
    if kind == "shape":
        return kind, draw(st.lists(st.integers(0, 5), min_size=0, max_size=4))
    if kind == "dtype":
        return kind, draw(st.sampled_from(DTYPES))
    return kind, draw(st.sampled_from([-(2**63), -(2**31), -1, VOCAB, 2**31, 2**63 - 1]))


def damaged(tensor: Tensor, damage: tuple[str, Any]) -> Tensor:
    kind, how = damage
    if kind == "shape":
        return torch.zeros(how, dtype=tensor.dtype)
    if kind == "dtype":
        return tensor.to(how)
    if kind == "strides":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "meta":
        return tensor.to("meta")
    if kind == "empty":
        return tensor[..., :0]
    return torch.full_like(
        tensor, float("nan") if tensor.is_floating_point() else how if tensor.dtype != torch.bool else 1
    )


def outcome(call: Any) -> Tensor | None:
    try:
        result: Tensor = call()
    except (ValueError, IndexError, TypeError, RuntimeError):
        return None
    return result


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(["tokens", "positions", "ancestors", "logits_at", "rows", "features"]),
    damage=damages(),
    rows=st.lists(st.integers(-3, 4), max_size=3),
    features=st.lists(st.one_of(st.integers(-3, 9), st.just("final")), max_size=3),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_targets(dtype: torch.dtype, name: str, damage: tuple[str, Any], rows: list[int], features: list[Any]) -> None:
    target = copy_of(decoder("llama", dtype))
    arguments: dict[str, Any] = {
        "tokens": torch.tensor([[1, 2, 3], [4, 5, 6]]),
        "positions": torch.tensor([[3, 4, 4], [5, 6, 6]]),
        "ancestors": torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool().expand(2, -1, -1),
        "logits_at": torch.tensor([[0, 2], [1, 1]]),
        "rows": [0, 1],
        "features": (2, "final"),
        "cache": fill(target, [3, 5]),
    }
    new = {"rows": rows, "features": tuple(features)}.get(name)
    arguments[name] = damaged(arguments[name], damage) if new is None else new
    out = outcome(lambda: target.forward(**arguments).logits)
    assert out is None or (out.shape[0] == 2 and out.shape[2] == VOCAB and out.isfinite().all())


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(["embedded", "hidden", "positions", "ancestors", "rows", "offset"]),
    damage=damages(),
    rows=st.lists(st.integers(-3, 4), max_size=3),
    offset=st.integers(-3, 70),
)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_draft_networks(kind: str, name: str, damage: tuple[str, Any], rows: list[int], offset: int) -> None:
    network = head(kind, dtype=torch.float32).network
    copy = native_network(network)
    assert copy is not None
    arguments: dict[str, Any] = {
        "embedded": torch.zeros(2, 3, 48),
        "hidden": torch.ones(2, 3, 48),
        "positions": torch.zeros(2, 3, dtype=torch.int64),
        "ancestors": torch.ones(2, 3, 3, dtype=torch.bool),
        "rows": [0, 1],
        "offset": 0,
        "cache": new_draft_cache(network, 2, 8, 64),
        "rotary": RotaryTable(network.config.layer.rope, torch.float32),
    }
    new = {"rows": rows, "offset": offset}.get(name)
    arguments[name] = damaged(arguments[name], damage) if new is None else new
    out = outcome(lambda: copy.forward(**arguments))
    assert out is None or out.shape == (2, 3, 48)
