"""Runs `Decoder` on the CPU kernels of `aquiline.native`, with one call for the whole stack.

It computes what `Decoder` computes, rounded at fewer places: the residual stream and the logits are
float32. A token's logits have the same bits whatever else is forwarded with it: alone, in a chain, a
tree or a batch, in a prompt's chunks of any length, on any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from aquiline.cache import KVCache
from aquiline.native.codes import GROUPS, WeightFormat
from aquiline.native.library import Layer, Library, Stack, find_library
from aquiline.native.packing import DTYPES, INPUT_PAD, Memory, alternating, padded, padded_heads
from aquiline.native.stack import FINAL, Angles, Inputs, NativeStack, readout
from aquiline.targets.decoder import Decoder, DecoderConfig
from aquiline.targets.layers import Attention, GatedMLP, LayerConfig, RMSNorm, decoder_layers, stack_cache
from aquiline.targets.rope import RopeConfig, inverse_frequencies
from aquiline.targets.target import TargetInput, TargetOutput, TargetShape, check_features


class NativeDecoder:
    """The native copy of a `Decoder`; implements `Target`. Made by `native`.

    Attributes:
        form: format of quantised weights, else None.
        dtype: bfloat16 or float32, of the cache and the features in any format of the weights.
    """

    exact = True

    def __init__(self, decoder: Decoder, library: Library, form: WeightFormat | None = None) -> None:
        config = decoder.config
        self.form = form
        self.config: DecoderConfig = config
        self.shape: TargetShape = decoder.shape
        self.dtype: torch.dtype = decoder.dtype
        self.device: torch.device = decoder.device
        # Only the embedding is shared with the original: the rest is packed, so that the original's
        # weights are freed when the caller drops it.
        self.embedding: Tensor = decoder.embed_tokens.weight.detach().contiguous()
        memory = Memory(library, form)
        weight = weight_bytes(self.dtype, form, library)
        memory.reserve(stack_bytes(config.layer, config.num_layers, config.vocab_size, weight, library.lanes))
        self._angles = AngleTable(config.layer.rope)
        layers = [
            pack_layer(memory, config.layer, layer.self_attn, layer.mlp, layer.input_layernorm,
                       layer.post_attention_layernorm, window=window, rotated=rotated)
            for layer, window, rotated in zip(
                decoder_layers(decoder.layers), config.windows, config.rotary, strict=True)
        ]  # fmt: skip
        struct = stack_struct(config.layer, layers, self.dtype)
        struct.embedding, struct.vocab = self.embedding.data_ptr(), config.vocab_size
        struct.final_norm = memory.norm(decoder.norm)
        self.project = readout(memory, decoder.lm_head.weight, self.dtype, inputs=config.layer.hidden_size, wide=True)
        struct.head = self.project.struct.matrix
        self._stack = NativeStack(library, struct, memory, self.dtype)

    def describe(self) -> str:
        """Names the path that forwards take, for `aquiline doctor` and for benchmarks."""
        return self._stack.describe()

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        config = self.config
        return stack_cache(config.layer, config.num_layers, rows, capacity, config.max_positions, self.embedding)

    def forward(self, inputs: TargetInput) -> TargetOutput:
        check_features(inputs.features, self.config.num_layers)
        span = reserve(inputs.cache, inputs.rows, inputs.tokens.shape[-1])
        boundaries = [FINAL if feature == "final" else int(feature) for feature in inputs.features]
        nodes = Inputs(inputs.positions, inputs.ancestors, inputs.rows, inputs.tokens)
        out = self._stack.forward(nodes, inputs.cache, self._angles.upto(span), boundaries, inputs.logits_at)
        assert out.logits is not None
        return TargetOutput(out.logits, out.features, out.best)

    def embed(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.embedding)


class AngleTable:
    """Float32 cosines and sines by position, grown on demand."""

    def __init__(self, rope: RopeConfig) -> None:
        self._frequencies, self._factor = inverse_frequencies(rope)
        empty = torch.empty(0, len(self._frequencies))
        self._angles, self._size = Angles(empty, empty), 0

    def upto(self, limit: int) -> Angles:
        """Returns the angles of at least all positions below `limit`."""
        if limit > self._size:
            self._size = max(1024, 1 << (limit - 1).bit_length())
            angles = torch.arange(self._size).float()[:, None] * self._frequencies[None, :]
            self._angles = Angles(angles.cos() * self._factor, angles.sin() * self._factor)
        return self._angles


def reserve(cache: KVCache, rows: Sequence[int], width: int, offset: int = 0) -> int:
    """Makes room for `width` more nodes in `rows`; returns the number of slots in use.

    Mutates: the capacity of `cache` where it is too small.
    """
    lengths = cache.lengths.tolist()
    span = max((lengths[row] for row in rows), default=0) + offset + width
    cache.reserve(span)
    return span


def supported(config: LayerConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns True if the kernels compute such layers."""
    return dtype in DTYPES and device.type == "cpu" and config.head_dim % 2 == 0 and config.rope.dim % 2 == 0


def stack_bytes(config: LayerConfig, layers: int, outputs: int, weight: float, lanes: int) -> int:
    """Returns a bound on the bytes of `layers` packed layers and a head of `outputs` rows, at `weight` bytes each."""
    dim = padded(config.head_dim, lanes)
    heads, hidden = config.num_heads * dim, padded(config.hidden_size, INPUT_PAD)
    inner = padded(config.intermediate_size, INPUT_PAD)
    rows = heads + 2 * config.num_kv_heads * dim
    layer = rows * hidden + hidden * padded(heads, INPUT_PAD) + 3 * inner * hidden
    return int((layers * (layer + 1024) + padded(outputs, lanes) * hidden) * weight)


def weight_bytes(dtype: torch.dtype, form: WeightFormat | None, library: Library) -> float:
    """Returns the bytes of a weight with its share of the scales."""
    if form is None:
        return 1.5 if dtype == torch.bfloat16 and library.squeezes else dtype.itemsize
    return 1 + 2 / GROUPS[form] if form == "int8" else 0.5 + 4 / GROUPS[form]


def pack_layer(
    memory: Memory,
    config: LayerConfig,
    attention: Attention,
    mlp: GatedMLP,
    first_norm: nn.Module | None,
    second_norm: RMSNorm,
    *,
    window: int | None = None,
    rotated: bool = True,
    columns: Tensor | None = None,
) -> Layer:
    """Packs one decoder layer.

    Args:
        first_norm: None or an identity if the attention reads the stream unnormed.
        columns: order of the inputs of q, k and v, -1 for padding; None for the stream's order.
    """
    lanes, heads, dim = memory.library.lanes, config.num_heads, config.head_dim
    all_heads = padded_heads(heads + 2 * config.num_kv_heads, dim, lanes)
    gate_up = alternating(config.intermediate_size, lanes)
    out = attention.o_proj
    return Layer(
        qkv=memory.matrix(
            *_stacked(attention.q_proj, attention.k_proj, attention.v_proj), rows=all_heads, columns=columns
        ),
        out=memory.matrix(out.weight, out.bias, columns=padded_heads(heads, dim, lanes)),
        gate_up=memory.matrix(*_stacked(mlp.gate_proj, mlp.up_proj), rows=gate_up),
        down=memory.matrix(mlp.down_proj.weight, mlp.down_proj.bias),
        first_norm=memory.norm(first_norm),
        second_norm=memory.norm(second_norm),
        query_norm=memory.norm(attention.q_norm) if attention.has_qk_norm else None,
        key_norm=memory.norm(attention.k_norm) if attention.has_qk_norm else None,
        window=window or 0,
        rotated=rotated,
    )


def _stacked(*parts: nn.Linear) -> tuple[Tensor, Tensor | None]:
    weights: list[Tensor] = [part.weight for part in parts]
    biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
    return torch.cat(weights), torch.cat(biases) if biases else None


def stack_struct(config: LayerConfig, layers: Sequence[Layer], dtype: torch.dtype) -> Stack:
    """Fills the fields that stacks of targets and of draft networks share."""
    return Stack(
        layers=(Layer * len(layers))(*layers),
        num_layers=len(layers),
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        dim=config.head_dim,
        rotary_half=config.rope.dim // 2,
        inner=config.intermediate_size,
        half=dtype == torch.bfloat16,
        gelu=config.activation == "gelu_pytorch_tanh",
        eps=config.rms_norm_eps,
        scale=config.head_dim**-0.5,
    )


def native(decoder: Decoder, library: Library | None = None, form: WeightFormat | None = None) -> NativeDecoder | None:
    """Makes the native copy of a decoder.

    Args:
        decoder: the original; drop it to free its weights.
        library: the kernels; None for those of this machine.
        form: quantise all matrices but the embedding to integers; None keeps their dtype.

    Returns:
        None where there are no kernels for this machine, the dtype, the device or the sizes.
    """
    if not supported(decoder.config.layer, decoder.dtype, decoder.device):
        return None
    library = library or find_library()[0]
    if library is None:
        return None
    with torch.no_grad():
        return NativeDecoder(decoder, library, form)
