"""Trains a small model: a decoder of few layers with the target's embedding and LM head, which stay frozen."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aquiline.models.files import filling
from aquiline.targets.decoder import Decoder, DecoderConfig, config_from_hf
from aquiline.targets.layers import DecoderLayer, RMSNorm, decoder_layers
from aquiline.targets.target import Feature
from aquiline.training.features import through_layer
from aquiline.training.learners.ahead import (
    TextBatch,
    counts_ahead,
    held_out_batch,
    loss_ahead,
    ranks_ahead,
    text_batch,
)
from aquiline.training.learners.learner import Acceptance, Example, Ranks, refresh
from aquiline.training.learners.target_parts import copy_parameters
from aquiline.training.processes import whole
from aquiline.training.settings import TrainSettings

_FIRST = 1  # it predicts the next token
_MEASURED_DEPTHS = 5
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


class SmallNetwork(nn.Module):
    """The trainable part of a small decoder: its layers and its norm.

    Args:
        config: of the small decoder.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config.layer) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.layer.hidden_size, config.layer.rms_norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One conversation's embeddings (1, n, H), cos and sin (1, n, dim) → normed streams (n, H)."""
        for rotated, layer in zip(self.config.rotary, decoder_layers(self.layers), strict=True):
            hidden = through_layer(layer, hidden, (cos, sin) if rotated else None)
        result: Tensor = self.norm(hidden)[0]
        return result


@dataclass(eq=False)
class SmallLearner:
    """A small model in training; a `Learner`.

    Attributes:
        network: float32 master weights, or a replica in the compute dtype.
        target: frozen.
        target_head: (Vd, H) rows of its LM head that the loss is computed over, in the compute dtype.
        fingerprint: of the target.
        source: folder of the target, whose tokenizer the small model shares.
        rule: of the distributions, see `aquiline.training.losses.distribution_loss`.
    """

    network: SmallNetwork
    target: Decoder
    target_head: Tensor
    fingerprint: str
    source: Path
    rule: str = "kl"
    fit_positions: int = 0
    packs: bool = True
    features: tuple[Feature, ...] = ("final",)
    depths: int = 1

    def counts(self, masks: Sequence[Tensor]) -> list[int]:
        return counts_ahead(masks, _FIRST, 1)

    def batch(self, examples: Sequence[Example]) -> TextBatch:
        return text_batch(examples)

    def streams(self, batch: TextBatch) -> list[Tensor]:
        """The (n, H) streams of all positions, in a list of one; conversations run one by one."""
        parts = []
        for tokens in torch.split(batch.tokens, list(batch.lengths)):
            cos, sin = self.target.rotary(torch.arange(len(tokens), device=tokens.device)[None], len(tokens))
            parts.append(self.network(self.target.embed(tokens[None]), cos, sin))
        return [torch.cat(parts)]

    def loss(self, batch: TextBatch, scales: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
        streams = self.streams(batch)
        return loss_ahead(streams, batch, _FIRST, self.target_head, self.target_head, scales, self.rule)

    def replica(self) -> SmallLearner:
        network = SmallNetwork(self.network.config).to(self.target_head)
        return refresh(dataclasses.replace(self, network=network), self)

    def fit(self, examples: Iterable[Example]) -> str:
        raise AssertionError("a small model starts as layers of the target; fit_positions is 0")

    def measure(self, tokens: Tensor, mask: Tensor) -> Ranks:
        batch, said = held_out_batch(self.target, tokens, mask)
        read_out = self.target.lm_head.weight  # it drafts every token, whatever its loss was over
        return ranks_ahead(self.streams(batch), batch, _FIRST, read_out, None, said, _MEASURED_DEPTHS)

    def describe(self) -> str:
        layers, all_layers = self.network.config.num_layers, self.target.config.num_layers
        return (
            f"A model of {layers} layers (the target has {all_layers}) with the target's embedding, LM head and "
            "tokenizer; it drafts every token."
        )

    def save(self, folder: Path, measured: Acceptance | None) -> None:
        from safetensors.torch import save_file

        tensors = {f"model.{name}": t for name, t in self.network.state_dict().items()}
        tensors["model.embed_tokens.weight"] = self.target.embed_tokens.weight
        if not self.target.config.tied:
            tensors["lm_head.weight"] = self.target.lm_head.weight
        tensors = {name: t.detach().cpu().to(torch.bfloat16).contiguous() for name, t in tensors.items()}
        config = json.loads((self.source / "config.json").read_text(encoding="utf-8"))
        config = small_model_json(config, self.network.config) | {"aquiline_target_fingerprint": self.fingerprint}
        if measured and measured.gamma:
            config["aquiline_gamma"] = measured.gamma
        with filling(folder) as scratch:
            save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
            (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            for name in _TOKENIZER_FILES:
                if (self.source / name).is_file():
                    shutil.copy(self.source / name, scratch / name)


def new_small(settings: TrainSettings, target: Decoder, target_head: Tensor, fingerprint: str) -> SmallLearner:
    """Makes a small model that starts as copies of the target's first and last layers.

    Args:
        settings: number of layers, loss and seed.
        target: the target.
        target_head: (Vd, H) rows of its LM head, all or those of the draft vocabulary.
        fingerprint: of the target.

    Raises:
        ValueError: for a target with a sliding window below the longest text.
    """
    torch.manual_seed(settings.seed)
    config = small_config(target.config, settings.num_layers)
    windows = [window for window in config.windows if window is not None]
    if windows and min(windows) < settings.max_length:
        raise ValueError(
            f"max_length is {settings.max_length}; allowed: ≤ {min(windows)} for a small model, this target's sliding "
            "window; lower it"
        )
    network = SmallNetwork(config)
    layers = decoder_layers(target.layers)
    for mine, source in zip(
        decoder_layers(network.layers), copied_layers(len(layers), len(network.layers)), strict=True
    ):
        with whole(layers[source]):
            copy_parameters(layers[source], mine)
    copy_parameters(target.norm, network.norm)
    network.float().to(target.device).train()
    return SmallLearner(network, target, target_head, fingerprint, Path(settings.target), settings.loss)


def copied_layers(total: int, wanted: int) -> list[int]:
    """Chooses the target's layers that a small model begins with: the first and the last ones.

    Raises:
        ValueError: for more layers than the target has.
    """
    if wanted > total:
        raise ValueError(f"num_layers is {wanted}; allowed: ≤ {total}, the target's layers; choose fewer")
    first = (wanted + 1) // 2
    return [*range(first), *range(total - (wanted - first), total)]


def small_config(config: DecoderConfig, layers: int) -> DecoderConfig:
    """The target's configuration with few layers."""
    kept = copied_layers(config.num_layers, layers)
    return replace(
        config,
        num_layers=layers,
        windows=tuple(config.windows[i] for i in kept),
        rotary=tuple(config.rotary[i] for i in kept),
    )


def small_model_json(config: dict[str, Any], wanted: DecoderConfig) -> dict[str, Any]:
    """Turns the target's config.json into the small model's."""
    result = config | {"num_hidden_layers": wanted.num_layers, "torch_dtype": "bfloat16", "dtype": "bfloat16"}
    if any(window is not None for window in wanted.windows) or "layer_types" in config:
        result["layer_types"] = [
            "full_attention" if window is None else "sliding_attention" for window in wanted.windows
        ]
        result.pop("max_window_layers", None)
    if config.get("model_type") == "smollm3":  # the only family that leaves layers without rotary positions
        result["no_rope_layers"] = [int(rotated) for rotated in wanted.rotary]
    assert config_from_hf(result) == wanted, "the written configuration must read back unchanged"
    return result
