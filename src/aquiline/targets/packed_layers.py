"""The packed decoder layer: what a forward does between the embedding and the last norm.

Everything from `normalise` to `run_layers` is written in the subset of Python that TorchScript
compiles: eager Python spends about a sixth of a one-token forward between the operations.
Where it cannot be compiled, the same functions run as they are.

(No `from __future__ import annotations` here: TorchScript reads the annotations.)
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache as once
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aquiline.cache import KVCache
from aquiline.targets.attention import attention_mask, place
from aquiline.targets.prepack import LayerWeights, Linear, Sizes
from aquiline.targets.rope import RotaryTable


class Frame(NamedTuple):
    """What all layers of one forward share.

    Attributes:
        sign: (2, 1), +1 and -1, for `normalise`.
        cos: (B, T, 1, 1, dim), ones beyond the rotated channels.
        sin: as `cos`, negative in its first half and zero beyond the rotated channels: a rotation
            is then x · cos + swapped(x) · sin.
        half: half of the rotated channels.
        masks: per layer (B, 1, R·group, span) additive, or None.
        into: (B, T, kv_heads, group, dim) view of the buffer that rotated queries go to.
        queries: (B, kv_heads, R·group, dim) view of the same buffer; R ≥ T, see `exact_rows`.
        key_slots: per layer (B, T, kv_heads, dim), the slots that new keys go to; where rows
            differ in length (rows, capacity, kv_heads, dim) with `rows` and `slots`.
        value_slots: as `key_slots`.
        rows: (B, 1) int64 or None.
        slots: (B, T) int64 or None.
        begins: first batch row of each run: batch rows whose cache rows are consecutive, too,
            so that what the attention reads are views.
        ends: one past the last batch row of each run.
        keys: per run and layer (b, kv_heads, span, dim).
        values: as `keys`.
    """

    sign: Tensor
    cos: Tensor
    sin: Tensor
    half: int
    masks: list[Tensor | None]
    into: Tensor
    queries: Tensor
    key_slots: list[Tensor]
    value_slots: list[Tensor]
    rows: Tensor | None
    slots: Tensor | None
    begins: list[int]
    ends: list[int]
    keys: list[list[Tensor]]
    values: list[list[Tensor]]


def normalise(x: Tensor, weight: Tensor, sign: Tensor, eps: float) -> Tensor:
    """RMSNorm of x (M, 1, H) as a LayerNorm over (x, -x): mean 0, variance mean(x²).

    PyTorch has one fast kernel for LayerNorm and none for RMSNorm on the CPU: this is a third of
    the time.
    """
    return torch.native_layer_norm(x * sign, [2, x.shape[-1]], weight, None, eps)[0][:, :1]


def linear(x: Tensor, packed: Linear) -> Tensor:
    """x Wᵀ + b."""
    return torch.ops.mkldnn._linear_pointwise(x, packed.weight, packed.bias, "none", [], "")  # type: ignore[no-any-return]


def linear_with(x: Tensor, other: Tensor, packed: Linear, operation: str) -> Tensor:
    """(x Wᵀ + b) "add"ed to or "mul"tiplied with `other` inside the matrix product."""
    return torch.ops.mkldnn._linear_pointwise(x, other, packed.weight, packed.bias, operation)  # type: ignore[no-any-return]


def gated_mlp(x: Tensor, residual: Tensor, weights: LayerWeights, sizes: Sizes) -> Tensor:
    """residual + down(act(gate(x)) · up(x)), all (M, 1, H)."""
    gate = torch.ops.mkldnn._linear_pointwise(
        x, weights.gate.weight, weights.gate.bias, sizes.activation, [], sizes.algorithm
    )
    return linear_with(linear_with(x, gate, weights.up, "mul"), residual, weights.down, "add")


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
    """As `flash`, by two batched matrix products with the keys on the left.

    For many rows of few queries each: the kernel behind `flash` sets a matrix product up for every
    key head of every row, which then costs more than the product.
    """
    scores = torch.matmul(keys, (queries * scale).transpose(2, 3)).transpose(2, 3).contiguous()
    if mask is not None:
        scores.add_(mask)
    return torch.matmul(torch.softmax(scores, -1), values)


def attend(frame: Frame, layer: int, scale: float) -> Tensor:
    """Attention of the queries in the frame's buffer: (M, 1, group · kv_heads · dim)."""
    mask = frame.masks[layer]
    parts: list[Tensor] = []
    for run in range(len(frame.begins)):
        begin, end = frame.begins[run], frame.ends[run]
        queries = frame.queries[begin:end]
        keys, values = frame.keys[run][layer], frame.values[run][layer]
        seen = None if mask is None else mask[begin:end]
        if end - begin >= 8 and queries.shape[2] <= 16:
            part = products(queries, keys, values, seen, scale)
        else:
            part = flash(queries, keys, values, seen, scale)
        parts.append(part.transpose(1, 2))
    mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
    return mixed.reshape(frame.into.shape[0] * frame.into.shape[1], 1, -1)


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
    return linear_with(attend(frame, layer, sizes.scale), residual, weights.out, "add")


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
        frame: of this forward.
        rotated: per layer, whether it has rotary positions.
        wanted: boundaries of the stream to return, ascending.

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
        The compiled function and True, or the function itself and False where TorchScript
        is missing or does not take it.
    """
    jit: Any = torch.jit
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and nothing else takes its place on a CPU
            script = jit.script(function)
    except (AttributeError, RuntimeError, NotImplementedError):
        return function, False

    def call(*arguments: Any) -> Any:
        # The optimising executor would specialise for every new shape and gains nothing here.
        with jit.optimized_execution(False):
            return script(*arguments)

    return call, True


KEY_BLOCK = 512
"""Keys that the attention kernel takes at once. With spans in whole blocks every product has the
same shape, whatever the length, so that its sums run in the same order."""


def exact_rows(width: int, group: int) -> int:
    """Number of nodes that the attention must be given for `width` nodes to come out exact.

    The attention kernel cuts the T·group query rows of a key head into blocks of 32; a block of
    fewer than four rows takes another kernel, with other rounding. Dummy nodes fill it up. Found
    by comparing bits over lengths and widths (`benchmarks/exactness.py`); a test holds it.
    """
    while 0 < width * group % 32 < 4:
        width += 1
    return width


def open_frame(
    positions: Tensor,
    ancestors: Tensor | None,
    cache: KVCache,
    rows: Sequence[int],
    rotary: RotaryTable,
    sizes: Sizes,
    windows: Sequence[int | None],
    offset: int = 0,
    exact: bool = False,
) -> Frame:
    """Reserves the cache and prepares what all layers of one forward share.

    Args:
        positions: (B, T) int64.
        ancestors: (B, T, offset + T) bool, or None for causal order.
        cache: the cache.
        rows: row slot of each batch row.
        rotary: the table; its dtype is the weights'.
        sizes: of the layers.
        windows: per layer, the sliding window or None.
        offset: uncommitted slots in use before the T new ones.
        exact: a row's bits must not depend on what else is forwarded, see `exact_rows`.

    Mutates: the capacity of `cache` where it is too small.
    """
    batch, width = positions.shape
    placement = place(cache, rows, width, offset, KEY_BLOCK if exact else 1)
    padded = exact_rows(width, sizes.group) if exact else width
    starts, span = placement.starts, placement.span
    half, cos, sin = _angles(positions, rotary, span, sizes.dim)
    masks = {}
    for window in set(windows):
        mask = attention_mask(placement, positions, ancestors, window, rotary.dtype)
        if mask is not None and padded > 1:
            mask = torch.nn.functional.pad(mask, (0, 0, 0, padded - width)).repeat_interleave(sizes.group, dim=1)
        masks[window] = None if mask is None else mask[:, None]
    make = cos.new_zeros if padded > width else cos.new_empty
    buffer = make(batch, padded, sizes.group, sizes.kv_heads, sizes.dim)
    keys, values = cache.key_block.transpose(2, 3), cache.value_block.transpose(2, 3)
    row_index = slots = None
    if isinstance(placement.rows, slice) and min(starts) == max(starts):
        new = (slice(None), placement.rows, slice(starts[0], starts[0] + width))
        keys, values = keys[new], values[new]
    else:
        row_index = torch.tensor(rows)[:, None]
        slots = torch.tensor(starts)[:, None] + torch.arange(width)
    begins, ends, run_keys, run_values = _runs(cache, rows, span)
    return Frame(
        sign=cos.new_tensor([[1.0], [-1.0]]),
        cos=cos,
        sin=sin,
        half=half,
        masks=[masks[window] for window in windows],
        into=buffer[:, :width].transpose(2, 3),
        queries=buffer.flatten(1, 2).transpose(1, 2),
        key_slots=list(keys.unbind(0)),
        value_slots=list(values.unbind(0)),
        rows=row_index,
        slots=slots,
        begins=begins,
        ends=ends,
        keys=run_keys,
        values=run_values,
    )


def _angles(positions: Tensor, rotary: RotaryTable, span: int, dim: int) -> tuple[int, Tensor, Tensor]:
    cos, sin = rotary.at(positions, span)
    half = cos.shape[-1] // 2
    sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    if 2 * half < dim:
        cos = torch.nn.functional.pad(cos, (0, dim - 2 * half), value=1.0)
        sin = torch.nn.functional.pad(sin, (0, dim - 2 * half))
    return half, cos[:, :, None, None], sin[:, :, None, None]


def _runs(
    cache: KVCache, rows: Sequence[int], span: int
) -> tuple[list[int], list[int], list[list[Tensor]], list[list[Tensor]]]:
    breaks = [i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1]
    begins, ends = [0, *breaks], [*breaks, len(rows)]
    keys, values = [], []
    for begin, end in zip(begins, ends, strict=True):
        slots = slice(rows[begin], rows[begin] + end - begin)
        keys.append(list(cache.key_block[:, slots, :, :span].unbind(0)))
        values.append(list(cache.value_block[:, slots, :, :span].unbind(0)))
    return begins, ends, keys, values
