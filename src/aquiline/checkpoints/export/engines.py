"""Lists what each serving engine runs, and rejects heads that need more.

Engines silently ignore most of what they cannot do, and the user sees an acceptance of zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aquiline.checkpoints.eagle.config_kinds import NORM_FLAGS
from aquiline.checkpoints.eagle.stored import StoredHead
from aquiline.targets.target import Feature, TargetShape, eagle3_layers


@dataclass(frozen=True)
class Engine:
    """The heads that one engine can run, according to its source.

    Attributes:
        fc_bias: kinds of heads whose fc may have a bias.
        qkv_bias: kinds whose q, k, v projections may have one.
        flags: norm switches that it honours.
        any_layers: more than one layer in an EAGLE-3 head.
        own_embedding: uses an embedding in the checkpoint.
        other_width: the head may be narrower or wider than its target.
        any_features: features other than the default three.
        any_count: a number of features other than three.
        free_head_dim: head_dim other than hidden_size / heads.
        ropes: scalings that it reads.
    """

    title: str
    eagle1: bool = False
    fc_bias: tuple[str, ...] = ()
    qkv_bias: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    any_layers: bool = False
    own_embedding: bool = True
    other_width: bool = True
    any_features: bool = True
    any_count: bool = False
    free_head_dim: bool = True
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "dynamic")


ENGINES = {
    "safeailab": Engine(
        "the reference implementation (SafeAILab/EAGLE)",
        eagle1=True,
        fc_bias=("eagle",),
        qkv_bias=("eagle",),
        any_features=False,
        free_head_dim=False,
        ropes=("default",),
    ),
    "speculators": Engine("speculators", flags=NORM_FLAGS, any_layers=True, any_count=True),
    "vllm": Engine("vLLM", eagle1=True, qkv_bias=("eagle",), flags=NORM_FLAGS, any_layers=True, any_count=True),
    "sglang": Engine("SGLang", eagle1=True, fc_bias=("eagle",), flags=("fc_norm", "norm_output")),
    "gguf": Engine(
        "llama.cpp", flags=("norm_before_residual", "norm_before_fc"), ropes=("default", "linear", "llama3")
    ),
    "openvino": Engine("OpenVINO GenAI", own_embedding=False, other_width=False),
}
FORMATS = tuple(ENGINES)
"""Names of all formats."""


def refusals(stored: StoredHead, to: str, target: TargetShape) -> list[str]:
    """Returns the reasons why an engine cannot run a head; empty if it can."""
    engine, config, layer = ENGINES[to], stored.config, stored.config.layer
    default = config.kind == "eagle" or config.features == _default_features(target)
    unknown = [flag for flag in NORM_FLAGS if getattr(config, flag) and flag not in engine.flags]
    checks = [
        (config.kind == "eagle" and not engine.eagle1, "it knows EAGLE-3 heads only, this is an EAGLE-1/2 head"),
        (config.fc_bias and config.kind not in engine.fc_bias, "it silently ignores the bias of fc"),
        (layer.qkv_bias and config.kind not in engine.qkv_bias, "it has no biases on q, k and v in this head"),
        (layer.o_bias or layer.mlp_bias, "biases in the output projection or the MLP were never tried with it"),
        (layer.qk_norm, "it has no norms on q and k in this head"),
        (bool(unknown), f"it silently ignores {' and '.join(unknown)}"),
        (config.kind == "eagle3" and config.num_layers > 1 and not engine.any_layers, "it runs one layer only"),
        (stored.embedding is not None and not engine.own_embedding, "it always takes the target's embedding"),
        (
            config.hidden_size != config.target_hidden_size and not (engine.other_width and config.kind == "eagle3"),
            "its head must be as wide as its target",
        ),
        (not default and not engine.any_features, f"it reads fixed layers, this head reads {config.features}"),
        (
            config.kind == "eagle3" and len(config.features) != 3 and not engine.any_count,
            f"it reads three features, this head reads {len(config.features)}",
        ),
        (
            layer.head_dim * layer.num_heads != layer.hidden_size and not engine.free_head_dim,
            f"it derives head_dim as hidden_size / heads, this head has {layer.head_dim}",
        ),
        (layer.rope.kind not in engine.ropes, f"it does not read {layer.rope.kind!r} rope scaling"),
        (layer.activation != "silu", f"it runs silu only, this head has {layer.activation}"),
        (to in ("gguf", "openvino") and stored.dtype == torch.float64, "it runs float32 at most, this head is float64"),
        (
            to == "openvino" and config.kind == "eagle3" and not _ascending_outputs(config.features),
            f"it reads outputs of layers in their order, this head reads {config.features}",
        ),
    ]
    reasons = [f"{engine.title}: {text}" for applies, text in checks if applies]
    return reasons + (sglang_ids(config.features, target)[1] if to == "sglang" and config.kind == "eagle3" else [])


def _default_features(target: TargetShape) -> tuple[Feature, ...] | None:
    return eagle3_layers(target.num_layers) if target.num_layers >= 7 else None


def _ascending_outputs(features: tuple[Feature, ...]) -> bool:
    """True for features that are outputs of layers, the lower ones first."""
    ids = [int(feature) for feature in features]
    return ids[0] >= 1 and ids == sorted(ids)


def sglang_ids(features: tuple[Feature, ...], target: TargetShape) -> tuple[list[int] | None, list[str]]:
    """Returns layer ids in SGLang's reading, outputs if the first is 1 and else boundaries; and reasons to refuse."""
    if features == _default_features(target):
        return None, []
    ids = [int(feature) for feature in features]
    if ids[0] == 2:
        return [i - 1 for i in ids], []
    if ids[0] == 1:
        return None, ["SGLang: it would read a list of layers that starts with 1 as one layer further up"]
    return ids, []
