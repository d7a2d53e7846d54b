"""A fast inference copy of `Decoder` for the CPU.

Why it is fast: the weights are stored as oneDNN's kernels want them, so that none is reordered
per call; q, k and v are one matrix; the activation, the gating product and both residual sums
happen inside the matrix products; the queries of a key head are folded into the row axis of one
attention call; and the twenty operations that are left of a layer run in a compiled loop.

It computes what `Decoder` computes, rounded at fewer places: equal within the noise of the
dtype, not bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from aquiline.cache import KVCache, new_cache
from aquiline.targets.decoder import Decoder, DecoderConfig, gather_positions
from aquiline.targets.layers import DecoderLayer
from aquiline.targets.packed_layers import compiled, linear, normalise, open_frame, run_layers
from aquiline.targets.prepack import (
    LayerWeights,
    Linear,
    mirrored,
    pack_decoder_layer,
    pack_linear,
    sizes_of,
)
from aquiline.targets.prepack import (
    packable as packable,
)
from aquiline.targets.rope import RotaryTable
from aquiline.targets.target import Feature, TargetOutput, TargetShape, check_features


class PackedDecoder:
    """The packed copy of a `Decoder`; implements `Target`. Made by `packed`.

    Attributes:
        config: sizes.
        shape: see `Target`.
        dtype: bfloat16 or float32.
        device: the CPU.
        compiled: whether the layers run in a compiled loop, or as plain Python.
    """

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        self.config: DecoderConfig = config
        self.shape: TargetShape = decoder.shape
        self.dtype: torch.dtype = decoder.dtype
        self.device: torch.device = decoder.device
        # Only the embedding is shared with the original: everything else is a packed copy, so
        # that the original's weights are freed when the caller drops it.
        self._embedding: Tensor = decoder.embed_tokens.weight.detach()
        self._sizes = sizes_of(config.layer)
        self._layers: list[LayerWeights] = [
            pack_decoder_layer(config.layer, cast(DecoderLayer, layer)) for layer in decoder.layers
        ]
        self._rotated = list(config.rotary)
        self._norm: Tensor = mirrored(decoder.norm)
        self._head: Linear = pack_linear(decoder.lm_head.weight)
        self._rotary = RotaryTable(config.layer.rope, self.dtype, self.device)
        self._run, self.compiled = compiled(run_layers)

    def describe(self) -> str:
        """Names the path that forwards take, for `aquiline doctor` and for benchmarks."""
        loop = "compiled loop" if self.compiled else "Python loop"
        return f"packed {str(self.dtype).removeprefix('torch.')} (oneDNN, {loop})"

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

    @torch.no_grad()
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
        """See `Target.forward`.

        A row's bits do not depend on how many others are forwarded with it, as long as its slot is
        its position: a chain gives exactly what its tokens give one by one, in bfloat16 too.
        """
        config, sizes = self.config, self._sizes
        check_features(features, config.num_layers)
        if tokens.numel() == 1:
            # One row alone would take a matrix-vector kernel, which rounds differently.
            alone = self.forward(
                tokens.expand(1, 2), torch.cat((positions, positions + 1), 1), None, cache, rows, features, logits_at
            )
            first = alone.logits[:, :1] if logits_at is None else alone.logits
            return TargetOutput(first, None if alone.features is None else alone.features[:, :1])
        frame = open_frame(positions, ancestors, cache, rows, self._rotary, sizes, config.windows, exact=True)
        batch, width = tokens.shape
        hidden = nn.functional.embedding(tokens.reshape(-1, 1), self._embedding)
        wanted = sorted({f for f in features if isinstance(f, int) and f < config.num_layers})
        hidden, streams = self._run(hidden, self._layers, sizes, frame, self._rotated, wanted)
        final = normalise(hidden, self._norm, frame.sign, sizes.eps)
        taken: dict[Feature, Tensor] = dict(zip(wanted, streams, strict=True))
        taken |= {config.num_layers: hidden, "final": final}
        picked = None
        if features:
            picked = torch.cat([taken[f] for f in features], dim=-1).view(batch, width, -1)
        final = final.reshape(batch, width, -1)
        return TargetOutput(self.project(gather_positions(final, logits_at)), picked)

    def embed(self, tokens: Tensor) -> Tensor:
        """See `Target.embed`."""
        return nn.functional.embedding(tokens, self._embedding)

    def project(self, hidden: Tensor) -> Tensor:
        """See `Target.project`."""
        return linear(hidden, self._head).float()


def packed(decoder: Decoder) -> PackedDecoder | None:
    """Makes the fast copy of a decoder.

    Returns:
        None where this machine, the dtype or the device has no kernels for it; use the decoder
        itself then.
    """
    if not packable(decoder.dtype, decoder.device):
        return None
    with torch.no_grad():
        return PackedDecoder(decoder)
