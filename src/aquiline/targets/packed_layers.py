"""The packed decoder layer: a forward between the embedding and the final norm.

Everything from `normalise` to `run_layers` uses the subset of Python that TorchScript compiles,
because eager Python spends about a sixth of a one-token forward between operations. If compilation
fails, the same functions run in Python.

(No `from __future__ import annotations` here: TorchScript reads the annotations.)
"""

import warnings
from collections.abc import Callable
from functools import cache as once
from typing import Any

import torch
from torch import Tensor

from aquiline.targets.packed_frame import Frame
from aquiline.targets.prepack import LayerWeights, Linear, Sizes


def normalise(x: Tensor, weight: Tensor, sign: Tensor, eps: float) -> Tensor:
    """RMSNorm of x (M, 1, H) as a LayerNorm over (x, -x): mean 0, variance mean(x²).

    On the CPU, PyTorch has a fast kernel for LayerNorm but none for RMSNorm: this takes a third of
    the time.
    """
    return torch.native_layer_norm(x * sign, [2, x.shape[-1]], weight, None, eps)[0][:, :1]


def linear(x: Tensor, packed: Linear) -> Tensor:
    """x Wᵀ + b."""
    return torch.ops.mkldnn._linear_pointwise(x, packed.weight, packed.bias, "none", [], "")  # type: ignore[no-any-return]


def linear_plus(x: Tensor, other: Tensor, packed: Linear) -> Tensor:
    """x Wᵀ + b + other, added inside the matrix product."""
    return torch.ops.mkldnn._linear_pointwise(x, other, packed.weight, packed.bias, "add")  # type: ignore[no-any-return]


def gated_mlp(x: Tensor, residual: Tensor, weights: LayerWeights, sizes: Sizes) -> Tensor:
    """residual + down(act(gate(x)) · up(x)), all (M, 1, H).

    oneDNN can fuse the activation and the product into two matrix products, but one product and two
    small operations are faster for few rows and no slower for many.
    """
    both = linear(x, weights.gate_up)
    inner = both.shape[-1] // 2
    gate = both[:, :, :inner]
    gate = torch.nn.functional.gelu(gate, approximate="tanh") if sizes.gelu else torch.nn.functional.silu(gate)
    return linear_plus(gate * both[:, :, inner:], residual, weights.down)


def store(block: Tensor, new: Tensor, rows: Tensor | None, slots: Tensor | None) -> None:
    """Writes (B, T, kv_heads, dim) into the cache."""
    if rows is not None and slots is not None:
        block.index_put_([rows, slots], new)
    else:
        block.copy_(new)


def norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis of the query and key heads (Qwen3)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate_and_store(both: Tensor, frame: Frame, layer: int, rotated: bool) -> None:
    """Rotates (B, T, kv_heads, group + 1, dim) into the queries' buffer and the cache's keys."""
    group, rotary = both.shape[3] - 1, 2 * frame.half
    keys = frame.key_slots[layer]
    if not rotated:
        frame.into.copy_(both.narrow(3, 0, group))
        store(keys, both.select(3, group), frame.rows, frame.slots)
        return
    if rotary == both.shape[4]:
        swapped = torch.roll(both, [frame.half], [-1])
    else:
        turned = torch.roll(both.narrow(4, 0, rotary), [frame.half], [-1])
        swapped = torch.cat([turned, both.narrow(4, rotary, both.shape[4] - rotary)], dim=-1)
    straight = both * frame.cos
    torch.addcmul(straight.narrow(3, 0, group), swapped.narrow(3, 0, group), frame.sin, out=frame.into)
    sin = frame.sin.select(3, 0)
    if frame.rows is None:
        torch.addcmul(straight.select(3, group), swapped.select(3, group), sin, out=keys)
    else:
        new = torch.addcmul(straight.select(3, group), swapped.select(3, group), sin)
        store(keys, new, frame.rows, frame.slots)


def flash(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention by PyTorch's own CPU kernel: (b, kv_heads, R, dim) → the same."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
        queries, keys, values, 0.0, False, attn_mask=mask, scale=scale
    )[0]


def products(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Like `flash`, with two batched matrix products and the keys on the left.

    For many rows with few queries each: the kernel of `flash` sets up a matrix product per key head
    and row, which then costs more than the product.
    """
    scores = torch.matmul(keys, (queries * scale).transpose(2, 3)).transpose(2, 3).contiguous()
    if mask is not None:
        scores.add_(mask)
    return torch.matmul(torch.softmax(scores, -1), values)


def attend(frame: Frame, layer: int, scale: float) -> Tensor:
    """Attention of the queries in the frame's buffer: (M, 1, group · kv_heads · dim)."""
    batch, width, heads, group, dim = frame.into.shape
    first = frame.pieces[0]
    single = first.end - first.begin == batch and first.last - first.first == width
    size = 0 if single else width * group
    whole = frame.into.new_zeros(batch, size, heads, dim)
    for i in range(len(frame.pieces)):
        piece, queries, mask = frame.pieces[i], frame.queries[i], frame.masks[i][layer]
        keys, values = frame.keys[i][layer], frame.values[i][layer]
        if not frame.exact and piece.end - piece.begin >= 8 and queries.shape[2] <= 16:
            part = products(queries, keys, values, mask, scale)
        else:
            part = flash(queries, keys, values, mask, scale)
        part = part.transpose(1, 2)[:, : (piece.last - piece.first) * group]
        if single:
            return part.reshape(batch * width, 1, heads * group * dim)
        whole[piece.begin : piece.end, piece.first * group : piece.last * group] = part
    return whole.view(batch * width, 1, heads * group * dim)


def attention_block(
    x: Tensor,
    residual: Tensor,
    weights: LayerWeights,
    sizes: Sizes,
    frame: Frame,
    layer: int,
    rotated: bool,
) -> Tensor:
    """residual (M, 1, H) + attention of x (M, 1, input); writes the new keys and values."""
    batch, width = frame.into.shape[0], frame.into.shape[1]
    qkv = linear(x, weights.qkv).view(batch, width, sizes.kv_heads, sizes.group + 2, sizes.dim)
    both = qkv.narrow(3, 0, sizes.group + 1)
    head_norm = weights.head_norm
    if head_norm is not None:
        both = norm_heads(both, head_norm, sizes.eps)
    rotate_and_store(both, frame, layer, rotated)
    store(frame.value_slots[layer], qkv.select(3, sizes.group + 1), frame.rows, frame.slots)
    return linear_plus(attend(frame, layer, sizes.scale), residual, weights.out)


def run_layers(
    hidden: Tensor,
    layers: list[LayerWeights],
    sizes: Sizes,
    frame: Frame,
    rotated: list[bool],
    wanted: list[int],
) -> tuple[Tensor, list[Tensor]]:
    """Runs pre-norm decoder layers.

    Args:
        hidden: (M, 1, H) residual stream, M = B·T.
        layers: weights.
        sizes: sizes.
        frame: the shared data of this forward.
        rotated: per layer, whether it uses rotary positions.
        wanted: boundaries of the residual stream to return, ascending.

    Returns:
        The stream after the last layer, and the stream entering each wanted layer.
    """
    taken: list[Tensor] = []
    for i in range(len(layers)):
        if i in wanted:
            taken.append(hidden)
        weights = layers[i]
        x = normalise(hidden, weights.first_norm, frame.sign, sizes.eps)
        hidden = attention_block(x, hidden, weights, sizes, frame, i, rotated[i])
        x = normalise(hidden, weights.second_norm, frame.sign, sizes.eps)
        hidden = gated_mlp(x, hidden, weights, sizes)
    return hidden, taken


@once
def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """Compiles one of the functions above, once per process.

    Returns:
        The compiled function and True, or the function itself and False if TorchScript is missing
        or rejects it.
    """
    jit: Any = torch.jit
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, but without a replacement on CPUs
            script = jit.script(function)
    except (AttributeError, RuntimeError, NotImplementedError):
        return function, False

    def call(*arguments: Any) -> Any:
        # The optimising executor would specialise for every new shape, without a gain here.
        with jit.optimized_execution(False):
            return script(*arguments)

    return call, True
