"""Implements the decoder layer of the Llama family, for targets and draft heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from aquiline.cache import KVCache, new_cache
from aquiline.targets.rope import RopeConfig, rotate


@dataclass(frozen=True)
class LayerConfig:
    """Sizes and switches of one decoder layer.

    Attributes:
        hidden_size: H, width of the residual stream.
        intermediate_size: I, width of the gated MLP.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads`.
        head_dim: width of a head; may differ from H / heads.
        qk_norm: RMSNorm over each head of q and k (Qwen3).
        activation: "silu" or "gelu_pytorch_tanh".
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_kv_heads} must divide num_attention_heads {self.num_heads}"
            )
        if self.activation not in ("silu", "gelu_pytorch_tanh"):
            raise ValueError(f"hidden_act {self.activation!r} is not supported; allowed: silu, gelu_pytorch_tanh")


class RMSNorm(nn.Module):
    """Root-mean-square norm, reduced in at least float32 (differs: transformers casts float64 down)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":  # one kernel; the CPU has none, and keeps its bits
            return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Joined(NamedTuple):
    """Several linears that read the same input, as one.

    Attributes:
        product: (…, inputs) → (…, sum of the outputs).
        norms: (heads + kv_heads, head_dim) weights of the norms of q and k, or None.
    """

    product: Callable[[Tensor], Tensor]
    norms: Tensor | None = None


def join(*linears: nn.Linear) -> Joined:
    """Joins linears into one product; their parameters become views of its weight, so that nothing is stored twice."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = torch.cat([linear.bias.detach() for linear in linears]) if linears[0].bias is not None else None
    sizes = [linear.out_features for linear in linears]
    for linear, part in zip(linears, torch.split(weight, sizes), strict=True):
        linear.weight = nn.Parameter(part, requires_grad=linear.weight.requires_grad)
    if bias is not None:
        for linear, part in zip(linears, torch.split(bias, sizes), strict=True):
            linear.bias = nn.Parameter(part, requires_grad=linear.bias.requires_grad)
    return Joined(partial(nn.functional.linear, weight=weight, bias=bias))


class Joinable(nn.Module):
    """A module whose `joined` linears are dropped when its parameters move."""

    joined: Joined | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Joinable:
        self.joined = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


class Attention(Joinable):
    """Projections of grouped-query attention; `attention.attention_output` computes the attention.

    Args:
        input_size: input width of q, k and v: H, or 2H in an EAGLE-3 head.
    """

    def __init__(self, config: LayerConfig, input_size: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = config.head_dim**-0.5
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(input_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(input_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.has_qk_norm = config.qk_norm

    def join(self, by: Callable[..., Joined] = join) -> None:
        """Makes fused forwards compute q, k and v in one product."""
        self.joined = by(self.q_proj, self.k_proj, self.v_proj)
        if self.has_qk_norm:
            norms = ((self.q_norm, self.num_heads), (self.k_norm, self.num_kv_heads))
            self.joined = self.joined._replace(norms=torch.cat([norm.weight.expand(n, -1) for norm, n in norms]))

    def qkv_heads(self, x: Tensor) -> Tensor:
        """Computes q, k and v before norms and rotation: (B, T, heads + 2 · kv_heads, head_dim)."""
        if self.joined is not None:
            flat = self.joined.product(x)
        else:
            flat = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1)
        return flat.view(*x.shape[:2], -1, self.head_dim)

    def normed(self, heads: Tensor) -> Tensor:
        """Norms q and k, (B, T, heads + kv_heads, head_dim), if the layer has norms."""
        if not self.has_qk_norm:
            return heads
        if self.joined is not None and self.joined.norms is not None:
            return nn.functional.rms_norm(heads, heads.shape[-1:], None, self.q_norm.eps) * self.joined.norms
        q, k = heads[:, :, : self.num_heads], heads[:, :, self.num_heads :]
        return torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)

    def qkv(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Computes q, k and v with rotary positions.

        Args:
            x: (B, T, input_size).
            cos: (B, T, dim) or None for a layer without rotary positions.
            sin: as `cos`.

        Returns:
            q (B, heads, T, head_dim), k and v (B, kv_heads, T, head_dim).
        """
        batch, width, _ = x.shape
        q = self.q_proj(x).view(batch, width, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(batch, width, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).view(batch, width, self.num_kv_heads, self.head_dim)
        if self.has_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cos is not None and sin is not None:
            cos, sin = cos[:, None], sin[:, None]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, v


class GatedMLP(Joinable):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)
        self.tanh_gelu = config.activation == "gelu_pytorch_tanh"

    def join(self, by: Callable[..., Joined] = join) -> None:
        """Makes `forward` compute gate and up in one product."""
        self.joined = by(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        """(…, H) → (…, H)."""
        if self.joined is not None:
            gate, up = self.joined.product(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        gate = nn.functional.gelu(gate, approximate="tanh") if self.tanh_gelu else nn.functional.silu(gate)
        result: Tensor = self.down_proj(gate * up)
        return result


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residuals.

    Args:
        input_norm: False omits `input_layernorm` (first layer of an EAGLE-1 head).
    """

    def __init__(self, config: LayerConfig, *, input_norm: bool = True) -> None:
        super().__init__()
        self.self_attn = Attention(config, config.hidden_size)
        self.mlp = GatedMLP(config)
        if input_norm:
            self.input_layernorm: nn.Module = RMSNorm(config.hidden_size, config.rms_norm_eps)
        else:
            self.input_layernorm = nn.Identity()
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """Computes everything after the attention: output projection, MLP and both residuals.

        Args:
            residual: (B, T, H) residual stream entering the layer.
            mixed: (B, T, heads * head_dim) attention output.
        """
        hidden = residual + self.self_attn.o_proj(mixed)
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


def stack_cache(layer: LayerConfig, layers: int, rows: int, capacity: int, most: int, like: Tensor) -> KVCache:
    """Allocates an empty cache for `layers` such layers, of at most `most` positions, where and as `like` is stored."""
    return new_cache(
        layers=layers,
        rows=rows,
        kv_heads=layer.num_kv_heads,
        key_dim=layer.head_dim,
        capacity=capacity,
        max_capacity=most,
        dtype=like.dtype,
        device=like.device,
    )


def decoder_layers(modules: nn.ModuleList) -> list[DecoderLayer]:
    """Returns the elements of a list of decoder layers, typed as such."""
    return cast("list[DecoderLayer]", list(modules))
