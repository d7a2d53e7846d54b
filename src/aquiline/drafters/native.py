"""A fast copy of a draft network on the CPU kernels; see `aquiline.targets.native`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from aquiline.cache import KVCache
from aquiline.drafters.eagle_network import Eagle3Network, EagleNetwork, HeadConfig, Network
from aquiline.native.codes import WeightFormat
from aquiline.native.draft import Growth, NativeDraft
from aquiline.native.library import FUSED, PAIRED, Layer, Library, Race, find_library
from aquiline.native.packing import INPUT_PAD, Memory, padded
from aquiline.native.stack import Inputs, NativeReadout, NativeStack, readout
from aquiline.targets.layers import RMSNorm, decoder_layers
from aquiline.targets.native import (
    AngleTable,
    NativeDecoder,
    pack_layer,
    reserve,
    stack_bytes,
    stack_struct,
    supported,
    weight_bytes,
)
from aquiline.targets.rope import RotaryTable
from aquiline.targets.target import Target
from aquiline.tree import DraftTree


class NativeNetwork:
    """The native copy of an EAGLE network, with the same methods; `native_network` makes it.

    A snapshot: later changes of the original's weights do not reach it.
    """

    def __init__(self, network: Network, library: Library, form: WeightFormat | None = None) -> None:
        config, weight = network.config, network.fc.weight
        self.config: HeadConfig = config
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device
        self._memory = Memory(library, form)
        size = stack_bytes(
            config.layer,
            config.num_layers,
            config.draft_vocab_size,
            weight_bytes(self.dtype, form, library),
            library.lanes,
        )
        self._memory.reserve(2 * size)
        self._angles = AngleTable(config.layer.rope)
        layers = self._layers(network)
        struct = stack_struct(config.layer, layers, self.dtype)
        self._fuse: NativeReadout | None = None
        if isinstance(network, Eagle3Network):
            first = network.midlayer
            struct.entry, struct.norm_before_residual = PAIRED, config.norm_before_residual
            struct.embedding_norm = self._memory.norm(first.input_layernorm)
            struct.hidden_norm = self._memory.norm(first.hidden_norm)
            self._read_outs(network)
        else:
            struct.entry = FUSED
            struct.fuse = self._memory.matrix(weight, network.fc.bias, columns=_joined(config.hidden_size, 2))
        self._stack = NativeStack(library, struct, self._memory, self.dtype)

    def _layers(self, network: Network) -> list[Layer]:
        memory, sizes = self._memory, self.config.layer
        packed = []
        if isinstance(network, Eagle3Network):
            first = network.midlayer
            packed.append(
                pack_layer(
                    memory, sizes, first.self_attn, first.mlp, None, first.post_attention_layernorm,
                    columns=_joined(sizes.hidden_size, 2),
                )
            )  # fmt: skip
        return packed + [
            pack_layer(memory, sizes, layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm)
            for layer in decoder_layers(network.layers)
        ]

    def _read_outs(self, network: Eagle3Network) -> None:
        memory, config, eps = self._memory, self.config, self.config.layer.rms_norm_eps
        norm: Tensor | None = None
        parts = 1
        if config.norm_before_fc:
            norm = network.input_norm.weight
        elif config.fc_norm:
            pieces: list[Tensor] = [cast(RMSNorm, part).weight for part in network.fc_norm]
            norm, parts = torch.stack(pieces).flatten(), len(pieces)
        fc = network.fc
        self._fuse = readout(
            memory, fc.weight, self.dtype, inputs=fc.in_features, norm=norm, parts=parts, bias=fc.bias, eps=eps
        )
        hidden, final = config.hidden_size, network.norm.weight
        self._feedback = readout(memory, None, self.dtype, inputs=hidden, norm=final, eps=eps)
        self._logits = readout(
            memory, network.lm_head.weight, self.dtype, inputs=hidden, norm=final, wide=True, eps=eps
        )

    def describe(self) -> str:
        """Names the path that forwards take."""
        return self._stack.describe()

    def fuse(self, features: Tensor) -> Tensor:
        return features if self._fuse is None else self._fuse(features)

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
        """As `aquiline.drafters.eagle_network.forward_network`, with float32 angles of its own in place of `rotary`."""
        span = reserve(cache, rows, embedded.shape[1], offset)
        inputs = Inputs(positions, ancestors, rows, embedded=embedded, hidden=hidden, offset=offset)
        stream = self._stack.forward(inputs, cache, self._angles.upto(span), stream=True).stream
        assert stream is not None
        return stream

    def drafting(self, embedding: Tensor, project: object, draft_to_target: Tensor | None) -> NativeDraft | None:
        """Builds what drafts in one call, or returns None where the kernels do not compute the logits.

        Args:
            embedding: (V, H) table of the drafted tokens' embeddings.
            project: the target's LM head, which EAGLE-1 and 2 use.
            draft_to_target: (Vd,) int64, or None.
        """
        own = self._fuse is not None  # EAGLE-3
        logits = self._logits if own else project
        if not isinstance(logits, NativeReadout) or embedding.dtype != self.dtype or logits.dtype_in != self.dtype:
            return None
        feedback = self._feedback if own and self.config.norm_output else None
        return NativeDraft(self._stack, self._fuse, logits, feedback, embedding.contiguous(), draft_to_target)

    def ingest(
        self,
        draft: NativeDraft,
        tokens: Sequence[Sequence[int]],
        features: Tensor,
        cache: KVCache,
        rows: Sequence[int],
        hidden: Tensor,
        logits: Tensor,
    ) -> None:
        """Makes room in the cache, and calls `NativeDraft.ingest`."""
        span = reserve(cache, rows, features.shape[1])
        draft.ingest(tokens, features, cache, rows, self._angles.upto(span), hidden, logits)

    def draft(
        self,
        draft: NativeDraft,
        roots: Sequence[int],
        logits: Tensor,
        hidden: Tensor,
        cache: KVCache,
        rows: Sequence[int],
        growth: Growth,
        races: Sequence[Race] = (),
    ) -> tuple[DraftTree, int]:
        """Makes room in the cache, and calls `NativeDraft.draft`."""
        span = reserve(cache, rows, max(growth.levels - 1, 1) * growth.width)
        return draft.draft(roots, logits, hidden, cache, rows, self._angles.upto(span), growth, races)

    def feedback(self, stream: Tensor) -> Tensor:
        return self._feedback(stream) if self.config.norm_output else stream

    def logits(self, stream: Tensor) -> Tensor:
        return self._logits(stream)


def _joined(size: int, parts: int) -> Tensor:
    """Returns the order of `parts` pieces of `size` inputs, each padded as the kernels join them; -1 for padding."""
    order = torch.full((parts, padded(size, INPUT_PAD)), -1)
    order[:, :size] = torch.arange(parts * size).view(parts, size)
    return order.flatten()


def native_network(network: Network, form: WeightFormat | None = None) -> NativeNetwork | None:
    """Makes the native copy of a draft network.

    Returns:
        None where there are no kernels for this machine, the dtype, the device or the sizes.
    """
    config, weight = network.config, network.fc.weight
    if not supported(config.layer, weight.dtype, weight.device):
        return None
    if config.kind == "eagle" and config.target_hidden_size != config.hidden_size:
        return None
    library = find_library()[0]
    if library is None:
        return None
    assert isinstance(network, EagleNetwork | Eagle3Network)
    with torch.no_grad():
        return NativeNetwork(network, library, form)


def native_draft(
    network: object, target: Target, embedding: Tensor | None, draft_to_target: Tensor | None
) -> NativeDraft | None:
    """Builds what drafts in one call with a native network; None for another network, or where it lacks a native part.

    Args:
        target: its embeddings and LM head are used if the target is native.
        embedding: (V, H_draft), the head's own, or None to use the target's.
        draft_to_target: (Vd,) int64, or None.
    """
    if not isinstance(network, NativeNetwork):
        return None
    project = None
    if isinstance(target, NativeDecoder):
        embedding, project = target.embedding if embedding is None else embedding, target.project
    return None if embedding is None else network.drafting(embedding, project, draft_to_target)
