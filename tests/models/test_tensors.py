"""The one judge of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aquiline.models.tensors import check_tensors

GOOD = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"a": None}, "a is missing; fetch"),
        ({"a": None, "b": None}, "a, b are missing"),
        ({f"x{i}": torch.zeros(1) for i in range(5)}, "x0, x1, x2 and 2 more are unexpected"),
        ({"a": torch.zeros(3, 2)}, r"a has shape \(3, 2\), expected \(2, 3\)"),
        ({"b": torch.zeros(4, dtype=torch.int8)}, "b has dtype torch.int8, expected floating point"),
        ({"b": torch.full((4,), torch.inf)}, "b holds NaN or infinity"),
    ],
)
def test_every_fault_is_named(change: dict[str, Any], fault: str) -> None:
    given = {name: tensor for name, tensor in (GOOD | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=f"^here: .*{fault}|^here: {fault.partition(';')[0]}"):
        check_tensors(GOOD, given, "here")


def test_what_fits_passes_in_any_float() -> None:
    check_tensors(GOOD, {name: tensor.to(torch.bfloat16) for name, tensor in GOOD.items()}, "here")
    check_tensors(GOOD, GOOD | {"b": torch.full((4,), torch.nan)}, "here", finite=False)


def test_the_caller_explains() -> None:
    with pytest.raises(ValueError, match="expected the other file"):
        check_tensors(GOOD, {"a": GOOD["a"]}, "here", lambda fault, name, tensor: f"expected the other file {fault}")
