"""A fast inference copy of a draft network for the CPU; see `aquiline.targets.packed`.

(No `from __future__ import annotations` here: TorchScript reads the annotations.)
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from aquiline.cache import KVCache
from aquiline.drafters.eagle_network import Eagle3Network, EagleNetwork, HeadConfig, Network
from aquiline.targets.layers import DecoderLayer, RMSNorm
from aquiline.targets.packed_frame import Frame, open_frame
from aquiline.targets.packed_layers import (
    attention_block,
    compiled,
    gated_mlp,
    linear,
    normalise,
)
from aquiline.targets.prepack import (
    LayerWeights,
    Linear,
    Sizes,
    mirrored,
    pack_decoder_layer,
    pack_layer,
    pack_linear,
    packable,
    sizes_of,
)
from aquiline.targets.rope import RotaryTable


class PackedNetwork:
    """The packed copy of an EAGLE network, created by `packed_network`, with the same methods.

    A snapshot: it does not follow later changes of the original's weights.

    Attributes:
        config: the head's configuration.
        dtype: bfloat16 or float32.
        device: the CPU.
        compiled: whether the layers run in a compiled loop rather than in plain Python.
    """

    def __init__(self, network: Network) -> None:
        config = network.config
        weight = network.fc.weight
        self.config: HeadConfig = config
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device
        self._sizes = sizes_of(config.layer)
        self._fc = pack_linear(weight, network.fc.bias)
        self._sign = weight.detach().new_tensor([[1.0], [-1.0]])
        plain = [pack_decoder_layer(config.layer, cast(DecoderLayer, layer)) for layer in network.layers]
        if isinstance(network, Eagle3Network):
            self._pack_eagle3(network, plain)
        else:
            self._layers = plain
            self._run, self.compiled = compiled(run_eagle)

    def _pack_eagle3(self, network: Eagle3Network, later: list[LayerWeights]) -> None:
        first = network.midlayer
        self._layers = [
            pack_layer(self.config.layer, first.self_attn, first.mlp, None, first.post_attention_layernorm),
            *later,
        ]
        self._embedding_norm, self._hidden_norm = mirrored(first.input_layernorm), mirrored(first.hidden_norm)
        self._norm = mirrored(network.norm)
        self._head: Linear = pack_linear(network.lm_head.weight)
        self._feature_norms: list[Tensor] = []
        if self.config.norm_before_fc:
            self._feature_norms = [mirrored(network.input_norm)]
        elif self.config.fc_norm:
            self._feature_norms = [mirrored(cast(RMSNorm, norm)) for norm in network.fc_norm]
        self._run, self.compiled = compiled(run_eagle3)

    def describe(self) -> str:
        """Describes the code path."""
        loop = "compiled loop" if self.compiled else "Python loop"
        return f"packed {str(self.dtype).removeprefix('torch.')} (oneDNN, {loop})"

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        flat = x.reshape(-1, 1, x.shape[-1])
        return normalise(flat, weight, self._sign, self._sizes.eps).reshape(x.shape)

    @torch.no_grad()
    def fuse(self, features: Tensor) -> Tensor:
        if self.config.kind == "eagle":
            return features
        if self._feature_norms:
            parts = features.chunk(len(self._feature_norms), dim=-1)
            features = torch.cat(
                [self._normed(part, norm) for part, norm in zip(parts, self._feature_norms, strict=True)], dim=-1
            )
        return linear(features, self._fc)

    @torch.no_grad()
    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        positions: Tensor,
        ancestors: Tensor | None,
        cache: KVCache,
        rows: Sequence[int],
        rotary: RotaryTable,
        offset: int = 0,
    ) -> Tensor:
        windows = [None] * len(self._layers)
        frame = open_frame(positions, ancestors, cache, rows, rotary, self._sizes, windows, offset)
        batch, width, size = hidden.shape
        embedded, hidden = embedded.reshape(-1, 1, embedded.shape[-1]), hidden.reshape(-1, 1, size)
        if self.config.kind == "eagle3":
            norms = (self._embedding_norm, self._hidden_norm)
            before = self.config.norm_before_residual
            stream = self._run(embedded, hidden, *norms, before, self._layers, self._sizes, frame)
        else:
            joined = torch.cat((embedded, hidden), dim=-1)
            stream = self._run(linear(joined, self._fc), self._layers, self._sizes, frame)
        result: Tensor = stream.view(batch, width, -1)
        return result

    @torch.no_grad()
    def feedback(self, stream: Tensor) -> Tensor:
        return self._normed(stream, self._norm) if self.config.norm_output else stream

    @torch.no_grad()
    def logits(self, stream: Tensor) -> Tensor:
        return linear(self._normed(stream, self._norm), self._head).float()


def run_eagle3(
    embedded: Tensor,
    hidden: Tensor,
    embedding_norm: Tensor,
    hidden_norm: Tensor,
    norm_before_residual: bool,
    layers: list[LayerWeights],
    sizes: Sizes,
    frame: Frame,
) -> Tensor:
    """The layers of an EAGLE-3 network: embedded and hidden (M, 1, H) → (M, 1, H)."""
    normed = normalise(hidden, hidden_norm, frame.sign, sizes.eps)
    joined = torch.cat([normalise(embedded, embedding_norm, frame.sign, sizes.eps), normed], dim=-1)
    residual = normed.contiguous() if norm_before_residual else hidden
    return run_rest(joined, residual, layers, sizes, frame)


def run_eagle(stream: Tensor, layers: list[LayerWeights], sizes: Sizes, frame: Frame) -> Tensor:
    """The layers of an EAGLE-1/2 network, whose first has no input norm: (M, 1, H) → (M, 1, H)."""
    return run_rest(stream, stream, layers, sizes, frame)


def run_rest(x: Tensor, stream: Tensor, layers: list[LayerWeights], sizes: Sizes, frame: Frame) -> Tensor:
    """Decoder layers of which the first reads x instead of the normed stream."""
    for i in range(len(layers)):
        weights = layers[i]
        if i > 0:
            x = normalise(stream, weights.first_norm, frame.sign, sizes.eps)
        stream = attention_block(x, stream, weights, sizes, frame, i, True)
        x = normalise(stream, weights.second_norm, frame.sign, sizes.eps)
        stream = gated_mlp(x, stream, weights, sizes)
    return stream


def packed_network(network: Network) -> PackedNetwork | None:
    """Creates the fast copy of a draft network.

    Returns:
        The copy, or None if the machine, dtype or device lacks the kernels; then use `network`.
    """
    weight = network.fc.weight
    if not packable(weight.dtype, weight.device):
        return None
    assert isinstance(network, EagleNetwork | Eagle3Network)
    with torch.no_grad():
        return PackedNetwork(network)
