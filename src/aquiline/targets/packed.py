"""A fast inference copy of `Decoder` for the CPU.

Why it is fast: the weights are stored as oneDNN's kernels want them, so that none is reordered
per call; q, k and v are one matrix, gate and up another; both residual sums happen inside the
matrix products; the queries of a key head are folded into the row axis of one
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
from aquiline.targets.packed_frame import open_frame
from aquiline.targets.packed_layers import compiled, linear, normalise, run_layers
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

LEAST_ROWS = 4


class PackedDecoder:
    """The packed copy of a `Decoder`; implements `Target`. Made by `packed`.

    Attributes:
        config: sizes.
        shape: see `Target`.
        dtype: bfloat16 or float32.
        device: the CPU.
        compiled: whether the layers run in a compiled loop, or as plain Python.
        exact: whether a node's bits must not depend on what else is forwarded.
    """

    def __init__(self, decoder: Decoder, exact: bool) -> None:
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
        self.exact = exact

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

        With `exact`, a node's bits do not depend on what else is forwarded, as long as its slot is
        its position: a chain gives exactly what its tokens give one by one.
        """
        config, sizes = self.config, self._sizes
        check_features(features, config.num_layers)
        width = tokens.shape[1]
        tokens, positions, ancestors = with_dummies(tokens, positions, ancestors)
        frame = open_frame(
            positions, ancestors, cache, rows, self._rotary, sizes, config.windows, exact=self.exact, real=width
        )
        hidden = nn.functional.embedding(tokens.reshape(-1, 1), self._embedding)
        wanted = sorted({f for f in features if isinstance(f, int) and f < config.num_layers})
        hidden, streams = self._run(hidden, self._layers, sizes, frame, self._rotated, wanted)
        final = normalise(hidden, self._norm, frame.sign, sizes.eps)
        taken: dict[Feature, Tensor] = dict(zip(wanted, streams, strict=True))
        taken |= {config.num_layers: hidden, "final": final}
        picked = None
        if features:
            picked = torch.cat([taken[f] for f in features], dim=-1).view(*tokens.shape, -1)[:, :width]
        final = final.reshape(*tokens.shape, -1)[:, :width]
        return TargetOutput(self.project(gather_positions(final, logits_at)), picked)

    def embed(self, tokens: Tensor) -> Tensor:
        """See `Target.embed`."""
        return nn.functional.embedding(tokens, self._embedding)

    def project(self, hidden: Tensor) -> Tensor:
        """See `Target.project`."""
        if hidden.numel() == hidden.shape[-1]:  # as in `with_dummies`
            alike = hidden.reshape(1, -1).expand(LEAST_ROWS, -1)
            return linear(alike, self._head)[:1].float().view(*hidden.shape[:-1], -1)
        return linear(hidden, self._head).float()


def with_dummies(tokens: Tensor, positions: Tensor, ancestors: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Appends nodes that nobody looks at where there are only one or two.

    A matrix with one row takes a matrix-vector kernel, which rounds differently; and the kernels
    for one and two rows take longer than the one for four.
    """
    batch, width = tokens.shape
    if batch * width >= LEAST_ROWS - 1:
        return tokens, positions, ancestors
    count = LEAST_ROWS // batch - width
    if ancestors is not None:
        ancestors = nn.functional.pad(ancestors, (0, count, 0, count))
    more = positions[:, -1:] + torch.arange(1, count + 1, device=positions.device)
    return torch.cat((tokens, tokens[:, :1].expand(-1, count)), 1), torch.cat((positions, more), 1), ancestors


def packed(decoder: Decoder, exact: bool | None = None) -> PackedDecoder | None:
    """Makes the fast copy of a decoder.

    Args:
        decoder: the original; drop it to free its weights.
        exact: bits of a node must not depend on what else is forwarded, so that a chain of drafts is
            verified with the bits of plain decoding. None: in bfloat16 alone, where the kernels
            allow it and rounding decides between tokens often enough to matter. Off is faster for
            many rows (`B ≥ 8`).

    Returns:
        None where this machine, the dtype or the device has no kernels for it; use the decoder
        itself then.
    """
    if not packable(decoder.dtype, decoder.device):
        return None
    with torch.no_grad():
        return PackedDecoder(decoder, decoder.dtype == torch.bfloat16 if exact is None else exact)
