"""A fast inference copy of `Decoder` for the CPU.

Why it is fast: the weights are stored in the layout that oneDNN's kernels want, so that none is
reordered per call; q, k and v are one matrix; the activation, the gating product and both
residual sums happen inside the matrix products; the queries of a key head are folded into the
row axis of one attention call; and a layer is about twenty small operations, not fifty.

It computes what `Decoder` computes, rounded at fewer places: equal within the noise of the
dtype, not bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aquiline.cache import KVCache, new_cache
from aquiline.targets.attention import attention_mask, place
from aquiline.targets.decoder import Decoder, DecoderConfig, gather_positions
from aquiline.targets.layers import Attention, GatedMLP, LayerConfig, RMSNorm
from aquiline.targets.rope import RotaryTable, rotate
from aquiline.targets.target import Feature, TargetOutput, TargetShape, check_features

_OPS: Any = torch.ops.mkldnn
_FLASH: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """A linear layer's weight in oneDNN's own layout, with its bias."""

    weight: Tensor
    bias: Tensor | None


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Packs a (out, in) weight; the original is not referenced."""
    bias = None if bias is None else bias.detach().clone()
    return PackedLinear(_OPS._reorder_linear_weight(weight.detach().contiguous(), None), bias)


def linear(x: Tensor, packed: PackedLinear, activation: str = "none") -> Tensor:
    """activation(x Wᵀ + b) of x (M, in); activation "none", "swish" or "gelu" (tanh form)."""
    algorithm = "tanh" if activation == "gelu" else ""
    result: Tensor = _OPS._linear_pointwise(x, packed.weight, packed.bias, activation, [], algorithm)
    return result


def linear_with(x: Tensor, other: Tensor, packed: PackedLinear, operation: str) -> Tensor:
    """(x Wᵀ + b) ∘ other, with ∘ "add" or "mul" inside the matrix product."""
    result: Tensor = _OPS._linear_pointwise.binary(x, other, packed.weight, packed.bias, operation)
    return result


@dataclass(frozen=True, eq=False)
class PackedNorm:
    """An RMSNorm as a LayerNorm over (x, -x): mean 0, variance mean(x²).

    PyTorch has one fast kernel for LayerNorm and none for RMSNorm on the CPU: this costs a third.

    Attributes:
        weight: (2, H).
        sign: (2, 1), +1 and -1.
        eps: epsilon.
    """

    weight: Tensor
    sign: Tensor
    eps: float


def pack_norm(norm: RMSNorm) -> PackedNorm:
    """Packs an RMSNorm."""
    weight = norm.weight.detach()
    sign = torch.tensor([[1.0], [-1.0]], dtype=weight.dtype)
    return PackedNorm(torch.stack((weight, weight)), sign, norm.eps)


def normalise(x: Tensor, norm: PackedNorm) -> Tensor:
    """RMSNorm over the last axis of x (…, H)."""
    mirrored = x.unsqueeze(-2) * norm.sign
    result: Tensor = torch.layer_norm(mirrored, mirrored.shape[-2:], norm.weight, None, norm.eps).select(-2, 0)
    return result


@dataclass(frozen=True, eq=False)
class PackedAttention:
    """Attention projections in key-head order.

    The rows of `qkv` are sorted by key head: its query heads, the key, the value. The columns of
    `out` are sorted to match what the grouped attention returns.

    Attributes:
        qkv: (kv_heads · (group + 2) · dim, input).
        out: (H, group · kv_heads · dim).
        query_norm: weights (group + 1, dim) of the q and k norms in one, or None.
        kv_heads: key heads.
        group: query heads of each.
        head_dim: dim.
        eps: of the q and k norms.
    """

    qkv: PackedLinear
    out: PackedLinear
    query_norm: Tensor | None
    kv_heads: int
    group: int
    head_dim: int
    eps: float


def pack_attention(attention: Attention, config: LayerConfig) -> PackedAttention:
    """Packs the four projections."""
    heads, dim = attention.num_kv_heads, attention.head_dim
    group = attention.num_heads // heads

    def joined(parts: list[Tensor]) -> Tensor:
        q, k, v = (part.detach().unflatten(0, (heads, -1, dim)) for part in parts)
        return torch.cat((q, k, v), dim=1).flatten(0, 2)

    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    bias = joined([p.bias for p in projections]) if projections[0].bias is not None else None
    norm = None
    if attention.has_qk_norm:
        query, key = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
        norm = torch.cat((query.expand(group, -1), key[None]))
    out = attention.o_proj.weight.detach().unflatten(1, (heads, group, dim))
    return PackedAttention(
        qkv=pack_linear(joined([p.weight for p in projections]), bias),
        out=pack_linear(out.transpose(1, 2).flatten(1), attention.o_proj.bias),
        query_norm=norm,
        kv_heads=heads,
        group=group,
        head_dim=dim,
        eps=config.rms_norm_eps,
    )


@dataclass(frozen=True, eq=False)
class PackedMLP:
    """The gated MLP."""

    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear
    activation: str


def pack_mlp(mlp: GatedMLP) -> PackedMLP:
    """Packs the three projections."""
    gate, up, down = (pack_linear(p.weight, p.bias) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    return PackedMLP(gate, up, down, "gelu" if mlp.tanh_gelu else "swish")


def apply_mlp(x: Tensor, residual: Tensor, mlp: PackedMLP) -> Tensor:
    """residual + MLP(x), all (M, H)."""
    inner = linear_with(x, linear(x, mlp.gate, mlp.activation), mlp.up, "mul")
    return linear_with(inner, residual, mlp.down, "add")


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive batch rows whose cache slots are consecutive too, so that reads are views.

    Attributes:
        rows: their batch indices.
        keys: per layer (b, kv_heads, span, dim).
        values: as `keys`.
    """

    rows: slice
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Frame:
    """What all layers of one forward share.

    Attributes:
        batch: B.
        width: T.
        cos: (B·T, 1, 1, dim), or dim/partial.
        sin: as `cos`; negative in its first half, so that a rotation is one roll.
        masks: by window: (B, 1, T·group, span) additive, or None.
        key_slots: per layer, the view (B, T, kv_heads, dim) that new keys go into; None where
            rows differ in length and `index` is used.
        value_slots: as `key_slots`.
        index: (rows (B, 1), slots (B, T)).
        key_rows: per layer (rows, capacity, kv_heads, dim).
        value_rows: as `key_rows`.
        runs: what the attention reads.
    """

    batch: int
    width: int
    cos: Tensor
    sin: Tensor
    masks: dict[int | None, Tensor | None]
    key_slots: tuple[Tensor, ...]
    value_slots: tuple[Tensor, ...]
    index: tuple[Tensor, Tensor] | None
    runs: tuple[Run, ...]


def open_frame(
    positions: Tensor,
    ancestors: Tensor | None,
    cache: KVCache,
    rows: Sequence[int],
    rotary: RotaryTable,
    group: int,
    windows: set[int | None],
) -> Frame:
    """Reserves the cache and prepares what all layers of one forward share.

    Mutates: the capacity of `cache` where it is too small.
    """
    batch, width = positions.shape
    placement = place(cache, rows, width)
    starts, span = placement.starts, placement.span
    cos, sin = rotary.at(positions.reshape(-1), span)
    half = sin.shape[-1] // 2
    sin = torch.cat((-sin[:, :half], sin[:, half:]), dim=-1)
    masks = {}
    for window in windows:
        mask = attention_mask(placement, positions, ancestors, window, rotary.dtype)
        if mask is not None:
            mask = mask[:, None] if width == 1 else mask.repeat_interleave(group, dim=1)[:, None]
        masks[window] = mask
    keys, values = cache.key_block.transpose(2, 3), cache.value_block.transpose(2, 3)
    index = None
    if isinstance(placement.rows, slice) and min(starts) == max(starts):
        keys, values = (block[:, placement.rows, starts[0] : starts[0] + width] for block in (keys, values))
    else:
        slots = torch.tensor(starts)[:, None] + torch.arange(width)
        index = (torch.tensor(rows)[:, None], slots)
    return Frame(
        batch=batch,
        width=width,
        cos=cos[:, None, None],
        sin=sin[:, None, None],
        masks=masks,
        key_slots=keys.unbind(0),
        value_slots=values.unbind(0),
        index=index,
        runs=_runs(cache, rows, span),
    )


def _runs(cache: KVCache, rows: Sequence[int], span: int) -> tuple[Run, ...]:
    breaks = [i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1]
    runs = []
    for begin, end in zip([0, *breaks], [*breaks, len(rows)], strict=True):
        slots = slice(rows[begin], rows[begin] + end - begin)
        keys, values = (block[:, slots, :, :span].unbind(0) for block in (cache.key_block, cache.value_block))
        runs.append(Run(slice(begin, end), keys, values))
    return tuple(runs)


def apply_attention(
    x: Tensor,
    residual: Tensor,
    attention: PackedAttention,
    frame: Frame,
    layer: int,
    *,
    rotated: bool = True,
    window: int | None = None,
) -> Tensor:
    """residual + attention(x); writes the new keys and values.

    Args:
        x: (M, input), M = B·T.
        residual: (M, H).
        attention: the projections.
        frame: of this forward.
        layer: index of the layer in the cache.
        rotated: whether the layer has rotary positions.
        window: the layer's sliding window.
    """
    heads, group, dim = attention.kv_heads, attention.group, attention.head_dim
    qkv = linear(x, attention.qkv).view(-1, heads, group + 2, dim)
    both = qkv[:, :, : group + 1]
    if attention.query_norm is not None:
        both = _head_norm(both, attention.query_norm, attention.eps)
    queries = both.new_empty(frame.batch, heads, frame.width, group, dim)
    shaped = (frame.batch, frame.width, heads, group + 2, dim)
    _rotate_into(both, queries, frame, layer, rotated)
    store(frame.value_slots[layer], qkv.view(shaped)[:, :, :, group + 1], frame.index)
    mixed = _attend(queries.flatten(2, 3), frame, layer, window, dim**-0.5)
    return linear_with(mixed, residual, attention.out, "add")


def _head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float() if x.dtype != torch.float32 else x
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def _rotate_into(both: Tensor, queries: Tensor, frame: Frame, layer: int, rotated: bool) -> None:
    """Rotates (M, kv_heads, group + 1, dim) into the queries' buffer and the cache."""
    group, dim = both.shape[2] - 1, both.shape[3]
    shape = (frame.batch, frame.width, *both.shape[1:])
    into = queries.transpose(1, 2)
    keys = frame.key_slots[layer]
    if not rotated or frame.cos.shape[-1] != dim:
        if rotated:
            half = frame.sin.shape[-1] // 2
            sin = torch.cat((-frame.sin[..., :half], frame.sin[..., half:]), dim=-1)
            both = rotate(both, frame.cos, sin)
        both = both.reshape(shape)
        into.copy_(both[:, :, :, :group])
        store(keys, both[:, :, :, group], frame.index)
        return
    straight = (both * frame.cos).view(shape)
    swapped = torch.roll(both, dim // 2, -1).view(shape)
    sin = frame.sin.view(frame.batch, frame.width, 1, 1, dim)
    torch.addcmul(straight[:, :, :, :group], swapped[:, :, :, :group], sin, out=into)
    last = (straight[:, :, :, group], swapped[:, :, :, group], sin[:, :, :, 0])
    if frame.index is None:
        torch.addcmul(*last, out=keys)
    else:
        store(keys, torch.addcmul(*last), frame.index)


def store(block: Tensor, new: Tensor, index: tuple[Tensor, Tensor] | None) -> None:
    """Writes new (B, T, kv_heads, dim) into the cache."""
    if index is None:
        block.copy_(new)
    else:
        block.index_put_(index, new)


def _attend(queries: Tensor, frame: Frame, layer: int, window: int | None, scale: float) -> Tensor:
    """(B, kv_heads, T·group, dim) → (M, group · kv_heads · dim)."""
    mask = frame.masks[window]
    parts = []
    for run in frame.runs:
        part = _FLASH(
            queries[run.rows],
            run.keys[layer],
            run.values[layer],
            0.0,
            False,
            attn_mask=None if mask is None else mask[run.rows],
            scale=scale,
        )[0]
        parts.append(part.transpose(1, 2))
    mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
    return mixed.reshape(frame.batch * frame.width, -1)


@dataclass(frozen=True, eq=False)
class PackedLayer:
    """One decoder layer."""

    first_norm: PackedNorm
    attention: PackedAttention
    second_norm: PackedNorm
    mlp: PackedMLP


class PackedDecoder:
    """The packed copy of a `Decoder`; implements `Target`. Made by `packed`.

    Args:
        decoder: its weights are copied; only the embedding is shared.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.config: DecoderConfig = decoder.config
        self.shape: TargetShape = decoder.shape
        self.dtype: torch.dtype = decoder.dtype
        self.device: torch.device = decoder.device
        self._embedding = decoder.embed_tokens.weight.detach()
        config = decoder.config.layer
        self._layers = tuple(
            PackedLayer(
                pack_norm(layer.input_layernorm),
                pack_attention(layer.self_attn, config),
                pack_norm(layer.post_attention_layernorm),
                pack_mlp(layer.mlp),
            )
            for layer in decoder.layers
        )
        self._norm = pack_norm(decoder.norm)
        self._head = pack_linear(decoder.lm_head.weight)
        self._rotary = RotaryTable(config.rope, self.dtype, self.device)
        self._group = config.num_heads // config.num_kv_heads

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """See `Target.new_cache`."""
        layer = self.config.layer
        return new_cache(
            layers=self.config.num_layers,
            rows=rows,
            kv_heads=layer.num_kv_heads,
            key_dim=layer.head_dim,
            capacity=capacity,
            max_capacity=self.config.max_positions,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        ancestors: Tensor | None,
        cache: KVCache,
        rows: Sequence[int],
        features: Sequence[Feature] = (),
        logits_at: Tensor | None = None,
    ) -> TargetOutput:
        """See `Target.forward`."""
        config = self.config
        check_features(features, config.num_layers)
        frame = open_frame(positions, ancestors, cache, rows, self._rotary, self._group, set(config.windows))
        shape = (*tokens.shape, config.layer.hidden_size)
        hidden = nn.functional.embedding(tokens.reshape(-1), self._embedding)
        taken: dict[Feature, Tensor] = {}
        for i, layer in enumerate(self._layers):
            if i in features:
                taken[i] = hidden
            hidden = apply_attention(
                normalise(hidden, layer.first_norm),
                hidden,
                layer.attention,
                frame,
                i,
                rotated=config.rotary[i],
                window=config.windows[i],
            )
            hidden = apply_mlp(normalise(hidden, layer.second_norm), hidden, layer.mlp)
        taken[config.num_layers] = hidden
        taken["final"] = final = normalise(hidden, self._norm)
        picked = torch.cat([taken[f] for f in features], dim=-1) if features else None
        logits = self.project(gather_positions(final.view(shape), logits_at))
        return TargetOutput(logits, None if picked is None else picked.view(*shape[:2], -1))

    def embed(self, tokens: Tensor) -> Tensor:
        """See `Target.embed`."""
        return nn.functional.embedding(tokens, self._embedding)

    def project(self, hidden: Tensor) -> Tensor:
        """See `Target.project`."""
        return linear(hidden, self._head).float()


def packable(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine has the kernels that packing needs."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(_OPS, "_linear_pointwise") or not hasattr(_OPS, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(_OPS._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def packed(decoder: Decoder) -> PackedDecoder | None:
    """Makes the fast copy, or returns None where the machine or the dtype has no kernels for it."""
    if not packable(decoder.dtype, decoder.device):
        return None
    with torch.inference_mode():
        return PackedDecoder(decoder)
