"""Packs linears in the layout of oneDNN's CPU kernels, for machines where `aquiline.native` does not run.

oneDNN reorders an ordinary weight in every call. A packed one is reordered once, which halves the
time of a forward of few tokens. All else is computed by the modules of the reference path.
"""

from __future__ import annotations

import copy
import platform
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from aquiline.targets.layers import Attention, GatedMLP, Joined

_OPS: Any = torch.ops.mkldnn

M = TypeVar("M", bound=nn.Module)


def fast_bfloat16(device: torch.device) -> bool:
    """True if a device multiplies bfloat16 matrices at least as fast as float32 ones.

    An x86 processor without AVX512-BF16 and AMX widens them first: 3 times slower with AVX-512, more with AVX2.
    On CUDA, bfloat16 is emulated before Ampere; on MPS, by the first chips.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    mkldnn: Any = torch.backends.mkldnn
    if device.type != "cpu" or not mkldnn.is_available() or not _OPS._is_mkldnn_bf16_supported():
        return False
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    cpu: Any = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())


def packable(dtype: torch.dtype, device: torch.device) -> bool:
    """True if this machine's oneDNN multiplies packed weights of `dtype` on `device`."""
    mkldnn: Any = torch.backends.mkldnn
    if device.type != "cpu" or not mkldnn.is_available():
        return False
    if not all(hasattr(_OPS, name) for name in ("_linear_pointwise", "_reorder_linear_weight")):
        return False
    if dtype == torch.bfloat16:
        return bool(_OPS._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class PackedLinear(nn.Module):
    """The packed copy of linears that read the same input; their outputs are concatenated."""

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self._weight: Tensor = _OPS._reorder_linear_weight(weight, None)
        biases: list[Tensor] = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        result: Tensor = _OPS._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return result


def packed(module: M) -> M | None:
    """Copies a decoder or a draft network, with packed linears; all other parameters are shared.

    The copy is for inference: it does not follow later changes of the original's linears.

    Args:
        module: the original; drop it to free its linears' weights.

    Returns:
        The copy, or None if the machine, dtype or device lacks the kernels; then use `module`.
    """
    parameter = next(module.parameters())
    if not packable(parameter.dtype, parameter.device):
        return None
    with torch.no_grad():
        return _copied(module)


def _copied(module: M) -> M:
    result, joined = copy.copy(module), set[nn.Module]()

    def join(*linears: nn.Linear) -> Joined:
        joined.update(linears)
        return Joined(PackedLinear(*linears))

    if isinstance(result, Attention | GatedMLP):
        result.join(join)
    result._modules = {
        name: PackedLinear(child) if isinstance(child, nn.Linear) else child and _copied(child)
        for name, child in module._modules.items()
        if child not in joined
    }
    return result
