"""Writes heads in the layout of the reference repository (SafeAILab/EAGLE), which is this package's own.

`midlayer.*`, `fc`, `norm`, `lm_head`, `d2t`, `t2d` for EAGLE-3; `fc`, `layers.0.*` for EAGLE-1/2. The
configuration has a few more keys than the reference reads: engines know them, or they start with
`aquiline_`. `aquiline export` rejects heads that the reference would misread.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.checkpoints.eagle.config_kinds import NORM_FLAGS
from aquiline.checkpoints.eagle.stored import StoredHead, stored_from_head
from aquiline.checkpoints.eagle.vocabulary import membership, offsets
from aquiline.drafters.eagle_network import DraftHead, HeadConfig
from aquiline.models.tensors import write_folder
from aquiline.targets.rope import RopeConfig


def write_head(folder: str | Path, head: DraftHead, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes a head as model.safetensors and config.json, each whole or not at all.

    Args:
        head: what to write; embeddings only if they are the head's own.
    """
    stored = stored_from_head(head, dtype)
    write_folder(folder, native_config(stored), file_tensors(stored))


def native_config(stored: StoredHead) -> dict[str, Any]:
    """Returns config.json in this package's own form."""
    config = stored.config
    result = llama_config(config, stored.dtype) | {"bias": config.fc_bias}
    if config.kind == "eagle3":
        result["eagle_aux_hidden_state_layer_ids"] = list(config.features)
    if stored.fingerprint:
        result["aquiline_target_fingerprint"] = stored.fingerprint
    if stored.gamma is not None:
        result["aquiline_gamma"] = stored.gamma
    if stored.window is not None:
        result["aquiline_window"] = stored.window
    return result


def llama_config(config: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the keys of config.json that all engines agree on; `bias` is false: most take it for the attention's."""
    eagle3 = config.kind == "eagle3"
    result: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if eagle3 else "LlamaForCausalLM"],
        "bias": False,
        **layer_keys(config),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if config.layer.qkv_bias:
        result["qkv_bias"] = True
    if config.target_hidden_size != config.hidden_size:
        result["target_hidden_size"] = config.target_hidden_size
    if eagle3:
        result["draft_vocab_size"] = config.draft_vocab_size
    result.update({flag: True for flag in NORM_FLAGS if getattr(config, flag)})
    return result


def layer_keys(config: HeadConfig) -> dict[str, Any]:
    """Returns the keys of a Llama's config.json: sizes, activation, rope.

    The rope base is there twice, because readers of either key silently fall back to 10000.
    """
    layer = config.layer
    return {
        "model_type": "llama",
        "attention_bias": False,
        "hidden_act": layer.activation,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": layer.rms_norm_eps,
        **rope_keys(layer.rope),
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }


def rope_keys(rope: RopeConfig) -> dict[str, Any]:
    """Returns `rope_theta`, `rope_parameters`, and `rope_scaling` if the frequencies are scaled."""
    parameters = {**dict(rope.scaling or {}), "rope_theta": rope.theta, "rope_type": rope.kind}
    parameters.pop("type", None)
    keys: dict[str, Any] = {"rope_theta": rope.theta, "rope_parameters": parameters}
    if rope.kind != "default":
        keys["rope_scaling"] = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return keys


def file_tensors(stored: StoredHead, first_layer: str = "midlayer") -> dict[str, Tensor]:
    """Returns the tensors under the names of files: layers counted from 0, the map as offsets.

    Args:
        first_layer: name of the first layer of an EAGLE-3 head in the file, "midlayer" or "layers.0".
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.tensors.items():
        found = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        if found and stored.config.kind == "eagle3":
            name = f"layers.{int(found[1]) + 1}.{found[2]}"
        tensors[re.sub(r"^midlayer\.", f"{first_layer}.", name)] = tensor
    if stored.draft_to_target is not None:
        tensors["d2t"] = offsets(stored.draft_to_target)
        tensors["t2d"] = membership(stored.draft_to_target, stored.config.vocab_size)
    if stored.embedding is not None:
        tensors["embed_tokens.weight"] = stored.embedding
    return tensors
