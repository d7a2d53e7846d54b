"""Translates the dialects of EAGLE head checkpoints into one vocabulary.

Each training stack has its own tensor names and configuration keys; they become those of `DraftHead` (`midlayer.*`
for the first layer of EAGLE-3, flat keys). Features that this engine lacks are rejected by name; values are not
checked.

| dialect | marked by |
|---|---|
| safeailab | nothing: the target's architecture, `midlayer.*` or a `layers.0` without its first norm |
| speculators | `speculators_model_type`, sizes inside `transformer_layer_config` |
| vllm | architecture `Eagle…` / `EAGLE…`, or the layer's config inside `model`, names under `model.` |
| sglang | architecture `LlamaForCausalLMEagle`, `LlamaForCausalLMEagle3` (SpecForge too), no top-level layer ids |
| modelopt | `eagle_config` and `layers.0.*` |
| angelslim | architecture `Eagle3LlamaForCausalLM` with `midlayer.*` |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aquiline.checkpoints.eagle.config_kinds import NORM_FLAGS, check_kinds

_OTHER_METHODS = {
    "peagle": "P-EAGLE drafts all positions in one pass from mask tokens",
    "dflash": "DFlash drafts blocks by diffusion",
    "dflash2": "DFlash2 drafts blocks by diffusion",
    "dspark": "DSpark is a Markov head over blocks",
    "mtp": "MTP layers belong to the target itself",
    "xpress": "XPress is not an EAGLE head",
}
_ONE_PASS = re.compile(r"p-?eagle", re.IGNORECASE)
_FOREIGN = re.compile(r"dflash|dspark|mtp|deepseek|llama4|minicpm|cohere|mistrallarge3|minimax|kimi|vl", re.IGNORECASE)
_MODELOPT_EXPECTED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}


@dataclass(frozen=True, eq=False)
class Translated:
    """A head's files in our own vocabulary.

    Attributes:
        kind: "eagle" or "eagle3".
        config: flat configuration.
        tensors: tensors under the names of `DraftHead.network`, and `embed_tokens.weight`, `d2t`,
            `t2d` where the files have them.
        notes: what was left out or assumed, one sentence each.
    """

    dialect: str
    kind: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    notes: tuple[str, ...]


def translate(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], place: str) -> Translated:
    """Recognises the dialect of a head and translates it.

    Args:
        tensors: its tensors under the names of the files.
        place: where they were read, for messages.

    Raises:
        ValueError: for a method or an architecture that this engine does not run.
    """
    check_kinds(raw, place)
    _refuse_foreign(raw, place)
    dialect = _dialect(raw, tensors)
    config, notes = _flat(raw, dialect, place)
    check_kinds(config, place)
    renamed = _renamed(tensors, dialect, place)
    kind = "eagle3" if _is_eagle3(renamed) else "eagle"
    if kind == "eagle3":
        renamed = _first_layer_apart(renamed, place)
    renamed, dropped = _without_leftovers(renamed, kind, zero_bias=dialect == "sglang" and config.get("bias") is False)
    return Translated(dialect, kind, config, renamed, (*notes, *dropped))


def _refuse_foreign(config: Mapping[str, Any], place: str) -> None:
    kind = str(config.get("speculators_model_type", ""))
    architecture = str((config.get("architectures") or [""])[0])
    if kind in _OTHER_METHODS or (kind and kind not in ("eagle", "eagle3")):
        reason = _OTHER_METHODS.get(kind, "it is not known here")
        raise ValueError(f"{place}: speculators_model_type {kind!r} is refused: {reason}; allowed: eagle, eagle3")
    if _ONE_PASS.match(architecture) or config.get("mask_token_id") is not None or config.get("parallel_drafting"):
        raise ValueError(f"{place}: a P-EAGLE head is refused: {_OTHER_METHODS['peagle']}, this engine drafts in turn")
    if _FOREIGN.search(architecture):
        raise ValueError(
            f"{place}: architecture {architecture!r} is refused: heads are Llama- or Qwen-style decoder layers "
            "of EAGLE-1, EAGLE-2 or EAGLE-3"
        )
    if config.get("logit_scale") not in (None, 1, 1.0):
        raise ValueError(
            f"{place}: logit_scale {config['logit_scale']} is refused: this engine does not scale draft logits"
        )
    if config.get("hot_vocab_size"):
        raise ValueError(
            f"{place}: hot_vocab_size {config['hot_vocab_size']} is refused: the token map of an FR-Spec head is a "
            "file of the engine, not of the head; serve it with SGLang"
        )


def _dialect(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    architecture = str((config.get("architectures") or [""])[0])
    if "speculators_model_type" in config:
        return "speculators"
    if isinstance(config.get("model"), Mapping) or "eagle_fc_bias" in config:
        return "vllm"
    if "eagle_config" in config and not any(name.startswith("midlayer.") for name in tensors):
        return "modelopt"
    if architecture.startswith("LlamaForCausalLMEagle"):
        # Ours are named like SGLang's, and list their layers at the top level, which SGLang does not read.
        ours = architecture.endswith("Eagle3") and "eagle_aux_hidden_state_layer_ids" in config
        return "safeailab" if ours else "sglang"
    if architecture == "Eagle3LlamaForCausalLM" and any(name.startswith("midlayer.") for name in tensors):
        return "angelslim"
    if architecture.lower().startswith("eagle"):
        return "vllm"
    return "safeailab"


def _flat(config: Mapping[str, Any], dialect: str, place: str) -> tuple[dict[str, Any], list[str]]:
    notes: list[str] = []
    flat = dict(config)
    if dialect == "speculators":
        inner = config.get("transformer_layer_config")
        if not isinstance(inner, Mapping):
            raise ValueError(f"{place}/config.json lacks transformer_layer_config, which holds a speculator's sizes")
        flat = {**inner, **{key: value for key, value in config.items() if key != "transformer_layer_config"}}
        if config.get("layernorms"):
            raise ValueError(
                f"{place}: a HASS-style head with layernorms is refused: this engine's EAGLE-1 network has none"
            )
        if "fusion_bias" in config:
            flat["bias"] = bool(config["fusion_bias"])
        if config["speculators_model_type"] == "eagle3" and "norm_before_residual" not in config:
            notes.append(
                "config.json does not set norm_before_residual: read as false, as speculators does (vLLM would read "
                "true); override it if the head was trained with true"
            )
    elif isinstance(config.get("model"), Mapping):
        flat = {**config["model"], **{key: value for key, value in config.items() if key != "model"}}
    if "eagle_fc_bias" in flat:
        flat["bias"] = bool(flat["eagle_fc_bias"])
    inner = flat.get("eagle_config")
    if isinstance(inner, Mapping):
        for key, expected in _MODELOPT_EXPECTED.items():
            if key in inner and inner[key] != expected:
                raise ValueError(f"{place}: eagle_config.{key} = {inner[key]!r} is refused; only {expected!r} is run")
        flat.update({key: inner[key] for key in NORM_FLAGS if key in inner and key not in flat})
    return flat, notes


def _renamed(tensors: Mapping[str, Tensor], dialect: str, place: str) -> dict[str, Tensor]:
    rules = [(r"^model\.", ""), (r"^draft_id_to_target_id$", "d2t")]
    if dialect == "speculators":
        rules += [(r"^fusion_fc\.", "fc."), (r"^transformer\.", "layers.0.")]
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = name
        for pattern, replacement in rules:
            new = re.sub(pattern, replacement, new)
        if new in result:
            raise ValueError(
                f"{place}: {name} and another tensor both mean {new}; the checkpoint holds two heads: fetch it again"
            )
        result[new] = tensor
    return result


def _is_eagle3(tensors: Mapping[str, Tensor]) -> bool:
    return any(name.startswith("midlayer.") or name == "layers.0.hidden_norm.weight" for name in tensors)


def _first_layer_apart(tensors: Mapping[str, Tensor], place: str) -> dict[str, Tensor]:
    """Files count the layers from 0; the network has `midlayer` and the ordinary layers after it."""
    if any(n.startswith("midlayer.") for n in tensors) and any(n.startswith("layers.0.") for n in tensors):
        raise ValueError(
            f"{place}: both midlayer.* and layers.0.* are there, and both are the first layer; fetch the head again"
        )

    def rename(name: str) -> str:
        found = re.match(r"layers\.(\d+)\.(.+)", name)
        if not found:
            return name
        index = int(found[1])
        return f"layers.{index - 1}.{found[2]}" if index else f"midlayer.{found[2]}"

    return {rename(name): tensor for name, tensor in tensors.items()}


def _without_leftovers(
    tensors: Mapping[str, Tensor], kind: str, *, zero_bias: bool
) -> tuple[dict[str, Tensor], list[str]]:
    kept, notes = dict(tensors), []
    for name in [name for name in kept if name.endswith("rotary_emb.inv_freq")]:
        del kept[name]
        notes.append(f"{name} is left out: frequencies follow from the configuration")
    if kind == "eagle" and "lm_head.weight" in kept:
        del kept["lm_head.weight"]
        notes.append("lm_head.weight is left out: an EAGLE-1/2 head reads out through the target's LM head")
    if zero_bias and kind == "eagle" and "fc.bias" in kept and not bool(kept["fc.bias"].any()):
        del kept["fc.bias"]
        notes.append("fc.bias is left out: it is all zeros, as SGLang needs it for a head without one")
    return kept, notes
