"""The EAGLE draft networks: EAGLE-1/2, and EAGLE-3 with the switches of 3.1.

Position t of a draft network pairs the target's feature at t with the *next* token x[t+1], uses
rotary position t, and predicts the token after, x[t+2]::

    target positions   0    1    2    3
    feature            f0   f1   f2   f3
    token              x1   x2   x3   x4      <- shifted by one
    predicts           x2   x3   x4   x5

Both networks have the same methods, so drafting, trees and training work with either: `fuse` maps
target features to the network's width once, `layer_input` joins token and feature, and `logits` maps
a hidden state to the draft vocabulary.

Source: EAGLE (arXiv 2401.15077 §4), EAGLE-3 (arXiv 2503.01840 §3), EAGLE 3.1 (arXiv 2605.09992).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from aquiline.cache import KVCache
from aquiline.targets.attention import attention_frame, attention_output, place
from aquiline.targets.layers import Attention, DecoderLayer, GatedMLP, LayerConfig, RMSNorm, decoder_layers, stack_cache
from aquiline.targets.rope import RotaryTable
from aquiline.targets.target import Feature


@dataclass(frozen=True)
class HeadConfig:
    """A draft head of the EAGLE family.

    Attributes:
        kind: "eagle" (EAGLE-1/2) or "eagle3".
        layer: sizes of its decoder layers; `hidden_size` is the draft's own width.
        num_layers: decoder layers, 1 in all published heads.
        vocab_size: V of the target.
        draft_vocab_size: Vd, number of ids that the head can draft; V without a reduction.
        target_hidden_size: H of the target.
        features: target features that the head reads; ("final",) for EAGLE-1/2.
        max_positions: the head's declared context length.
        fc_bias: whether the fusing linear layer has a bias (EAGLE-1/2).
        norm_before_residual: whether EAGLE-3's residual is the normed feature.
        norm_before_fc: whether one RMSNorm covers the concatenated features.
        fc_norm: whether each feature has its own RMSNorm (3.1).
        norm_output: whether the feedback is the *normed* hidden state (3.1).
    """

    kind: str
    layer: LayerConfig
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    features: tuple[Feature, ...]
    num_layers: int = 1
    max_positions: int = 2048
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("eagle", "eagle3"):
            raise ValueError(f"head kind {self.kind!r} is not known; allowed: eagle, eagle3")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        if self.kind == "eagle" and (self.draft_vocab_size != self.vocab_size or self.features != ("final",)):
            raise ValueError('an EAGLE-1/2 head reads the feature "final" and drafts the whole vocabulary')

    @property
    def hidden_size(self) -> int:
        """Width of the head's residual stream."""
        return self.layer.hidden_size


class EagleNetwork(nn.Module):
    """EAGLE-1/2: fc over [embedding, feature], then a decoder layer without a first norm.

    Without its own final norm and LM head: its output approximates the target's "final" feature, the
    input of the target's LM head.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(hidden + config.target_hidden_size, hidden, bias=config.fc_bias)
        self.layers = nn.ModuleList(DecoderLayer(config.layer, input_norm=i > 0) for i in range(config.num_layers))

    def fuse(self, features: Tensor) -> Tensor:
        """Returns the features unchanged, (B, T, H)."""
        return features

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Joins embeddings and features, both (…, H), to the input of the fusing linear."""
        return torch.cat((embedded, hidden), dim=-1)

    def enter(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Joins token embeddings and features, both (B, T, H), into the stream (B, T, H)."""
        result: Tensor = self.fc(self.join(embedded, hidden))
        return result

    def attention(self, layer: int) -> Attention:
        """Returns the projections of one layer."""
        return decoder_layers(self.layers)[layer].self_attn

    def layer_input(self, layer: int, stream: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the input of q, k and v, and the residual, of one layer."""
        return decoder_layers(self.layers)[layer].input_layernorm(stream), stream

    def layer_finish(self, layer: int, residual: Tensor, mixed: Tensor) -> Tensor:
        """Applies the output projection, MLP and residuals of one layer."""
        return decoder_layers(self.layers)[layer].finish(residual, mixed)

    def feedback(self, stream: Tensor) -> Tensor:
        """Returns the hidden state that replaces the feature in the next draft step."""
        return stream


class Eagle3Layer(nn.Module):
    """The first layer of an EAGLE-3 head: attention reads [norm(embedding), norm(feature)]."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)


class Eagle3Network(nn.Module):
    """EAGLE-3: fused target features, 2H-wide attention input, its own norm and LM head."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.layer.rms_norm_eps
        count = len(config.features)
        self.fc = nn.Linear(count * config.target_hidden_size, hidden, bias=config.fc_bias)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(count * config.target_hidden_size, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps) for _ in range(count))
        self.midlayer = Eagle3Layer(config.layer)
        self.layers = nn.ModuleList(DecoderLayer(config.layer) for _ in range(config.num_layers - 1))
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)

    def fuse(self, features: Tensor) -> Tensor:
        """Fuses the target's features, (B, T, count · H_t) → (B, T, H); only once, not per draft step."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.config.features), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        result: Tensor = self.fc(features)
        return result

    def enter(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return hidden  # the embedding joins it in the first layer

    def attention(self, layer: int) -> Attention:
        return self.midlayer.self_attn if layer == 0 else decoder_layers(self.layers)[layer - 1].self_attn

    def layer_input(self, layer: int, stream: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        if layer > 0:
            return decoder_layers(self.layers)[layer - 1].input_layernorm(stream), stream
        normed = self.midlayer.hidden_norm(stream)
        joined = torch.cat((self.midlayer.input_layernorm(embedded), normed), dim=-1)
        return joined, normed if self.config.norm_before_residual else stream

    def layer_finish(self, layer: int, residual: Tensor, mixed: Tensor) -> Tensor:
        if layer > 0:
            return decoder_layers(self.layers)[layer - 1].finish(residual, mixed)
        hidden = residual + self.midlayer.self_attn.o_proj(mixed)
        result: Tensor = hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))
        return result

    def feedback(self, stream: Tensor) -> Tensor:
        """Returns the hidden state that replaces the feature in the next step: pre-norm, or normed in 3.1."""
        result: Tensor = self.norm(stream) if self.config.norm_output else stream
        return result

    def logits(self, stream: Tensor) -> Tensor:
        """Returns logits over the draft vocabulary, (…, H) → (…, Vd), in at least float32."""
        logits: Tensor = self.lm_head(self.norm(stream))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


Network = EagleNetwork | Eagle3Network


@dataclass(eq=False)
class DraftHead:
    """A draft network with its vocabulary map and embedding.

    Attributes:
        draft_to_target: (Vd,) int64 target id of each draft id, or None if they coincide.
        embedding: (V, H_draft), the head's own embedding, or None to use the target's.
        target_fingerprint: fingerprint of the target it was trained for, or None if unknown.
        gamma: exponent of its probabilities in coupled drafts, > 0; None if not measured.
        window: committed positions that it sees, up to twice as many; None: all.
    """

    network: Network
    draft_to_target: Tensor | None = None
    embedding: Tensor | None = None
    target_fingerprint: str | None = None
    gamma: float | None = None
    window: int | None = None

    @property
    def config(self) -> HeadConfig:
        return self.network.config


def head_on(head: DraftHead, device: torch.device) -> DraftHead:
    """Moves a head to a device; mutates the network, which moves in place."""
    mapping, embedding = head.draft_to_target, head.embedding
    return replace(
        head,
        network=head.network.to(device),
        draft_to_target=None if mapping is None else mapping.to(device),
        embedding=None if embedding is None else embedding.to(device),
    )


def build_network(config: HeadConfig) -> Network:
    """Creates a randomly initialised network."""
    return Eagle3Network(config) if config.kind == "eagle3" else EagleNetwork(config)


def new_draft_cache(network: Network, rows: int, capacity: int, max_capacity: int) -> KVCache:
    """Allocates the head's own cache."""
    config = network.config
    return stack_cache(config.layer, config.num_layers, rows, capacity, max_capacity, network.fc.weight)


def forward_network(
    network: Network,
    embedded: Tensor,
    hidden: Tensor,
    positions: Tensor,
    ancestors: Tensor | None,
    cache: KVCache,
    rows: Sequence[int],
    rotary: RotaryTable,
    offset: int = 0,
) -> Tensor:
    """Runs the network on T positions after its cache; writes keys and values but does not advance.

    Args:
        embedded: (B, T, H) embeddings of the shifted tokens.
        hidden: (B, T, H) fused target features, or the feedback of the previous step.
        positions: (B, T) int64 feature positions.
        ancestors: (B, T, offset + T) bool over the uncommitted slots, or None for causal order.
        offset: uncommitted slots in use before these T (earlier levels of the tree).

    Returns:
        (B, T, H) stream after the last layer (pre-norm).
    """
    placement = place(cache, rows, embedded.shape[1], offset)
    sizes = network.config.layer
    fused = embedded.device.type != "cpu" or network.attention(0).joined is not None
    group = sizes.num_heads // sizes.num_kv_heads
    frame = attention_frame(cache, placement, positions, ancestors, rotary, [None], group, fused)
    stream = network.enter(embedded, hidden)
    for i in range(network.config.num_layers):
        read_from, residual = network.layer_input(i, stream, embedded)
        mixed = attention_output(network.attention(i), read_from, frame, i, None, True)
        stream = network.layer_finish(i, residual, mixed)
    return stream
