"""Implements the Llama-family decoder: Llama, Mistral, Qwen2, Qwen3, SmolLM2/3.

The reference path, for any dtype and device; `aquiline.targets.native` is its fast copy on CPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aquiline.cache import KVCache
from aquiline.models.tensors import check_tensors
from aquiline.targets.attention import AttentionFrame, attention_frame, attention_output, place
from aquiline.targets.layers import DecoderLayer, LayerConfig, RMSNorm, decoder_layers, stack_cache
from aquiline.targets.rope import RotaryTable, max_positions, rope_from_hf
from aquiline.targets.target import Feature, TargetInput, TargetOutput, TargetShape, check_features

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""`model_type`s of Hugging Face configurations that this decoder supports."""

_QWEN = {
    "num_key_value_heads": 32, "max_position_embeddings": 32768, "max_window_layers": 28, "sliding_window": 4096,
}  # fmt: skip

FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "smollm3": {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "eos_token_id": 128001,
    },
}
"""transformers' defaults for settings that a config.json of the family omits; no model omits hidden_size,
num_hidden_layers and other sizes without a default here."""

_MLP_BIAS, _ATTENTION_BIAS = ("llama", "smollm3"), ("llama", "qwen3", "smollm3")
# The other families ignore these settings.


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of a decoder.

    Attributes:
        windows: per layer, the sliding window or None.
        rotary: per layer, whether it uses rotary positions (in SmolLM3, some layers do not).
        tied: the LM head shares the embedding's weight.
    """

    layer: LayerConfig
    vocab_size: int
    num_layers: int
    max_positions: int
    windows: tuple[int | None, ...]
    rotary: tuple[bool, ...]
    tied: bool


def config_from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Hugging Face config.json as transformers does: with the defaults of the family, and no setting
    that the family ignores.

    Raises:
        ValueError: for a model_type outside `FAMILIES` or an unsupported setting.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} is not supported by this decoder; allowed: {', '.join(FAMILIES)}")
    config = {**FAMILY_DEFAULTS[str(family)], **config}
    layers, heads, hidden = config["num_hidden_layers"], config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    bias = family in _ATTENTION_BIAS and bool(config.get("attention_bias", False))
    layer = LayerConfig(
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=rope_from_hf(config, head_dim),
        qkv_bias=family == "qwen2" or bias,
        o_bias=bias,
        mlp_bias=family in _MLP_BIAS and bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        activation=config.get("hidden_act", "silu"),
    )
    return DecoderConfig(
        layer=layer,
        vocab_size=config["vocab_size"],
        num_layers=layers,
        max_positions=max_positions(config),
        windows=_windows(config, layers),
        rotary=_rotary(config, layers),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    family = config["model_type"]
    if window is None or family == "llama" or (family != "mistral" and not config.get("use_sliding_window", False)):
        return (None,) * layers
    if family == "mistral":  # ignores layer_types
        return (window,) * layers
    kinds = config.get("layer_types")
    if kinds is not None:
        return tuple(
            window if kind == "sliding_attention" else None for kind in _per_layer("layer_types", kinds, layers)
        )
    if family == "smollm3":
        return tuple(None if rotary else window for rotary in _rotary(config, layers))
    return tuple(window if i >= config["max_window_layers"] else None for i in range(layers))


def _rotary(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    if config["model_type"] != "smollm3":
        return (True,) * layers
    flags = config.get("no_rope_layers")  # 1 means the layer *has* rotary positions
    if flags is None:
        interval = config.get("no_rope_layer_interval", 4)
        return tuple((i + 1) % interval != 0 for i in range(layers))
    return tuple(bool(flag) for flag in _per_layer("no_rope_layers", flags, layers))


def _per_layer(name: str, values: Any, layers: int) -> Sequence[Any]:
    if not isinstance(values, list) or len(values) != layers:
        raise ValueError(f"{name} is {values!r:.80}; allowed: a list with an entry for each of the {layers} layers")
    return values


class Decoder(nn.Module):
    """A Llama-family decoder with an explicit cache; implements `Target`.

    Parameter names are those of Hugging Face checkpoints without the leading ``model.``.
    """

    exact = False

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.layer.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.layers = nn.ModuleList(DecoderLayer(config.layer) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, config.layer.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.shape = TargetShape(config.vocab_size, hidden, config.num_layers, config.max_positions)
        self._rotary_table: RotaryTable | None = None

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the weights."""
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embed_tokens.weight.device

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.config.layer.num_heads // self.config.layer.num_kv_heads

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        config = self.config
        return stack_cache(
            config.layer, config.num_layers, rows, capacity, config.max_positions, self.embed_tokens.weight
        )

    def rotary(self, positions: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of `positions` (all below `limit`), each (*positions.shape, dim)."""
        return self.rotary_table.at(positions, limit)

    @property
    def rotary_table(self) -> RotaryTable:
        """Cosines and sines, in the dtype and on the device of the weights."""
        table = self._rotary_table
        if table is None or (table.dtype, table.device) != (self.dtype, self.device):
            table = self._rotary_table = RotaryTable(self.config.layer.rope, self.dtype, self.device)
        return table

    def join(self) -> None:
        """Joins projections that read the same input: fewer kernels, which is what a GPU waits for.

        Logits change within rounding. The parameters become views of the joined weights.
        """
        for layer in decoder_layers(self.layers):
            layer.self_attn.join()
            layer.mlp.join()

    def forward(self, inputs: TargetInput) -> TargetOutput:
        cache, features = inputs.cache, inputs.features
        check_features(features, self.config.num_layers)
        placement = place(cache, inputs.rows, inputs.tokens.shape[1])
        fused = self.device.type != "cpu" or decoder_layers(self.layers)[0].self_attn.joined is not None
        frame = attention_frame(
            cache,
            placement,
            inputs.positions,
            inputs.ancestors,
            self.rotary_table,
            self.config.windows,
            self.group,
            fused,
        )
        return self.through_layers(inputs.tokens, frame, features, inputs.logits_at)

    def through_layers(
        self, tokens: Tensor, frame: AttentionFrame, features: Sequence[Feature], logits_at: Tensor | None = None
    ) -> TargetOutput:
        """Runs (B, T) tokens at the places of `frame`; see `TargetInput`."""
        hidden = self.embed_tokens(tokens)
        taken: dict[Feature, Tensor] = {}
        for i, layer in enumerate(decoder_layers(self.layers)):
            if i in features:
                taken[i] = hidden
            window, rotated = self.config.windows[i], self.config.rotary[i]
            mixed = attention_output(layer.self_attn, layer.input_layernorm(hidden), frame, i, window, rotated)
            hidden = layer.finish(hidden, mixed)
        taken[self.config.num_layers] = hidden
        taken["final"] = final = self.norm(hidden)
        picked = torch.cat([taken[f] for f in features], dim=-1) if features else None
        return TargetOutput(self.project(gather_positions(final, logits_at)), picked)

    def embed(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.embed_tokens(tokens)
        return result

    def project(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def gather_positions(hidden: Tensor, at: Tensor | None) -> Tensor:
    """Selects the positions `at` (B, K) of hidden (B, T, H), giving (B, K, H); None selects all."""
    if at is None:
        return hidden
    return hidden.gather(1, at[:, :, None].expand(-1, -1, hidden.shape[-1]))


def load_state(model: Decoder, tensors: Mapping[str, Tensor], origin: str) -> None:
    """Copies a Hugging Face state dict into `model`, checking every key.

    Args:
        model: receives the weights (cast to its dtype).
        tensors: name → tensor; names with or without the leading ``model.``.
        origin: where they were read, for messages.

    Raises:
        ValueError: tensors are missing, unexpected, misshapen or not floating point; names them.
    """
    given = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    given = {name: t for name, t in given.items() if not name.endswith("rotary_emb.inv_freq")}
    expected = model.state_dict()
    if model.config.tied:
        expected.pop("lm_head.weight")
        given.pop("lm_head.weight", None)
    check_tensors(expected, given, origin, finite=False)  # reading many GB is slow, and NaN shows in the logits
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(given[name])
