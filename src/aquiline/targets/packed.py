"""A fast inference copy of `Decoder` for the CPU.

It is fast because weights are stored in oneDNN's layout and never reordered per call; q, k and v
are one matrix, gate and up another; both residual sums happen inside the matrix products; the
queries of a key head are folded into the query axis of one attention call; and the remaining twenty
operations of a layer run in a compiled loop.

It rounds in fewer places than `Decoder`, so results agree within the precision of the dtype, not
bit by bit.
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
    """The packed copy of a `Decoder`, created by `packed`; implements `Target`.

    Attributes:
        config: sizes.
        shape: see `Target`.
        dtype: bfloat16 or float32.
        device: the CPU.
        compiled: whether the layers run in a compiled loop rather than in plain Python.
        exact: whether a node's bits are independent of the rest of its forward.
    """

    def __init__(self, decoder: Decoder, exact: bool) -> None:
        config = decoder.config
        self.config: DecoderConfig = config
        self.shape: TargetShape = decoder.shape
        self.dtype: torch.dtype = decoder.dtype
        self.device: torch.device = decoder.device
        # Only the embedding is shared with the original; everything else is a packed copy, so that
        # the original's weights are freed when the caller drops it.
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
        """Describes the code path, for `aquiline doctor` and for benchmarks."""
        loop = "compiled loop" if self.compiled else "Python loop"
        return f"packed {str(self.dtype).removeprefix('torch.')} (oneDNN, {loop})"

    def new_cache(self, rows: int, capacity: int) -> KVCache:
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
        """Implements `Target.forward`.

        With `exact`, a node's bits are independent of the rest of the forward as long as its slot is
        its position: a chain gives the same bits as its tokens one by one.
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
        return nn.functional.embedding(tokens, self._embedding)

    def project(self, hidden: Tensor) -> Tensor:
        if hidden.numel() == hidden.shape[-1]:  # as in `with_dummies`
            alike = hidden.reshape(1, -1).expand(LEAST_ROWS, -1)
            return linear(alike, self._head)[:1].float().view(*hidden.shape[:-1], -1)
        return linear(hidden, self._head).float()


def with_dummies(tokens: Tensor, positions: Tensor, ancestors: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pads one- or two-node inputs to four rows.

    A single row would use a matrix-vector kernel, which rounds differently, and the kernels for one
    and two rows are slower than the one for four.
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
    """Creates the fast copy of a decoder.

    Args:
        decoder: the original; drop it to free its weights.
        exact: keep a node's bits independent of the rest of its forward, so that verifying a chain
            gives the bits of plain decoding. None enables it in bfloat16, where the kernels allow it
            and rounding decides between tokens often enough to matter. False is faster for B ≥ 8.

    Returns:
        The copy, or None if the machine, dtype or device lacks the kernels; then use `decoder`.
    """
    if not packable(decoder.dtype, decoder.device):
        return None
    with torch.no_grad():
        return PackedDecoder(decoder, decoder.dtype == torch.bfloat16 if exact is None else exact)
