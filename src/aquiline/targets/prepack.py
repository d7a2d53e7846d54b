"""Packs weights into the layout of oneDNN's CPU kernels, and checks for these kernels.

(No `from __future__ import annotations` here: TorchScript reads the annotations of the tuples.)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aquiline.targets.layers import Attention, DecoderLayer, GatedMLP, LayerConfig, RMSNorm

_OPS: Any = torch.ops.mkldnn


def packable(dtype: torch.dtype, device: torch.device) -> bool:
    """True if this machine has the kernels for packed weights of `dtype` on `device`."""
    mkldnn: Any = torch.backends.mkldnn
    if device.type != "cpu" or not mkldnn.is_available():
        return False
    if not all(hasattr(_OPS, name) for name in ("_linear_pointwise", "_reorder_linear_weight")):
        return False
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return False
    if dtype == torch.bfloat16:
        return bool(_OPS._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class Linear(NamedTuple):
    """A linear layer: the packed weight and the bias."""

    weight: Tensor
    bias: Tensor | None


class LayerWeights(NamedTuple):
    """The packed weights of one decoder layer.

    Attributes:
        first_norm: (2, H), see `mirrored`; unused if the caller norms the input.
        qkv: rows sorted by key head: its query heads, the key, the value.
        head_norm: (group + 1, dim), the q and k norms in one, or None.
        out: columns sorted by (group, key head, dim), the order of the attention's output.
        second_norm: (2, H).
        gate_up: the MLP's gate and up projections, stacked.
        down: the MLP's down projection.
    """

    first_norm: Tensor
    qkv: Linear
    head_norm: Tensor | None
    out: Linear
    second_norm: Tensor
    gate_up: Linear
    down: Linear


class Sizes(NamedTuple):
    """Sizes shared by the layers of a model.

    Attributes:
        kv_heads: key heads.
        group: query heads per key head.
        dim: head dimension.
        eps: epsilon of the norms.
        scale: factor on the attention scores.
        gelu: whether the activation is tanh-GELU rather than SiLU.
    """

    kv_heads: int
    group: int
    dim: int
    eps: float
    scale: float
    gelu: bool


def sizes_of(config: LayerConfig) -> Sizes:
    """Derives the sizes of packed layers from a layer's configuration."""
    return Sizes(
        kv_heads=config.num_kv_heads,
        group=config.num_heads // config.num_kv_heads,
        dim=config.head_dim,
        eps=config.rms_norm_eps,
        scale=config.head_dim**-0.5,
        gelu=config.activation == "gelu_pytorch_tanh",
    )


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Packs a (out, in) weight; keeps no reference to the original."""
    packed = _OPS._reorder_linear_weight(weight.detach().contiguous(), None)
    return Linear(packed, None if bias is None else bias.detach().clone())


def _stacked(first: nn.Linear, second: nn.Linear) -> Linear:
    bias = None if first.bias is None else torch.cat((first.bias, second.bias))
    return pack_linear(torch.cat((first.weight, second.weight)), bias)


def mirrored(norm: RMSNorm) -> Tensor:
    """Stacks an RMSNorm's weight twice, (2, H), for `packed_layers.normalise`."""
    return torch.stack((norm.weight.detach(), norm.weight.detach()))


def pack_layer(
    config: LayerConfig,
    attention: Attention,
    mlp: GatedMLP,
    first_norm: RMSNorm | None,
    second_norm: RMSNorm,
) -> LayerWeights:
    """Packs one decoder layer; `first_norm` is None if the caller norms the input."""
    kv_heads, dim = config.num_kv_heads, config.head_dim
    group = config.num_heads // kv_heads

    def joined(parts: Sequence[Tensor]) -> Tensor:
        # A matrix (rows, input) or a bias (rows,).
        heads = [part.detach().view(kv_heads, -1, *part.shape[1:]) for part in parts]
        return torch.cat(heads, dim=1).flatten(0, 1)

    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [p.bias for p in qkv if p.bias is not None]
    head_norm = None
    if attention.has_qk_norm:
        query, key = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
        head_norm = torch.cat((query.expand(group, -1), key[None]))
    out = attention.o_proj.weight.detach().view(-1, kv_heads, group, dim)
    return LayerWeights(
        first_norm=mirrored(first_norm or second_norm),
        qkv=pack_linear(joined([p.weight for p in qkv]), joined(biases) if biases else None),
        head_norm=head_norm,
        out=pack_linear(out.transpose(1, 2).flatten(1), attention.o_proj.bias),
        second_norm=mirrored(second_norm),
        gate_up=_stacked(mlp.gate_proj, mlp.up_proj),
        down=pack_linear(mlp.down_proj.weight, mlp.down_proj.bias),
    )


def pack_decoder_layer(config: LayerConfig, layer: DecoderLayer) -> LayerWeights:
    """Packs a pre-norm `DecoderLayer`, with or without its first norm."""
    first = layer.input_layernorm
    return pack_layer(
        config,
        layer.self_attn,
        layer.mlp,
        first if isinstance(first, RMSNorm) else None,
        layer.post_attention_layernorm,
    )
