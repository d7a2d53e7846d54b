"""Draft heads in the layout of the reference repository (SafeAILab/EAGLE), read strictly.

Source: tensors and keys as published for EAGLE-1/2 and EAGLE-3; see `docs/ARCHITECTURE.md`.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.drafters.eagle import DraftHead, HeadConfig, build_network
from aquiline.targets.layers import LayerConfig
from aquiline.targets.rope import rope_from_hf
from aquiline.targets.target import Feature, TargetShape, eagle3_layers


def read_config(folder: Path) -> dict[str, Any]:
    """Reads config.json of a head's folder.

    Raises:
        ValueError: if it is missing or is not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a draft head: it has no config.json")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Reads the tensors of a head: model.safetensors, else pytorch_model.bin without code.

    Raises:
        ValueError: if there is no file, it is corrupt, or a pickle holds more than tensors.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for name in ("model.safetensors", "pytorch_model.bin"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            if name.endswith(".safetensors"):
                return load_file(path)
            return dict(torch.load(path, map_location="cpu", weights_only=True))
        except (
            SafetensorError,
            pickle.UnpicklingError,
            RuntimeError,
            EOFError,
            ValueError,
        ) as error:
            raise ValueError(
                f"{path} cannot be read: {error}. Fetch the head again; code in pickles is refused"
            ) from error
    raise ValueError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


def head_config(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetShape) -> HeadConfig:
    """Derives the head's configuration from config.json and the tensors' names.

    Args:
        config: config.json.
        tensors: as read.
        target: the target that the head is meant for.

    Raises:
        ValueError: if the head does not fit the target; says in which size.
    """
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if key not in config:
            raise ValueError(f"config.json of the head lacks {key!r}")
    eagle3 = "midlayer.self_attn.q_proj.weight" in tensors
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = int(config.get("target_hidden_size") or hidden)
    if width != target.hidden_size:
        raise ValueError(f"the head was made for hidden_size {width}, this target has {target.hidden_size}")
    if config["vocab_size"] != target.vocab_size:
        raise ValueError(
            f"the head was made for vocab_size {config['vocab_size']}, this target has {target.vocab_size}"
        )
    head_dim = config.get("head_dim") or hidden // heads
    layer = LayerConfig(
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=rope_from_hf(config, head_dim),
        qkv_bias=bool(config.get("qkv_bias", False)),
    )
    declared = config.get("eagle_aux_hidden_state_layer_ids")
    features: tuple[Feature, ...] = ("final",)
    if eagle3:
        features = tuple(declared) if declared else eagle3_layers(target.num_layers)
    return HeadConfig(
        kind="eagle3" if eagle3 else "eagle",
        layer=layer,
        vocab_size=config["vocab_size"],
        draft_vocab_size=(config.get("draft_vocab_size") or config["vocab_size"]) if eagle3 else config["vocab_size"],
        target_hidden_size=width,
        features=features,
        num_layers=config.get("num_hidden_layers", 1),
        max_positions=config.get("max_position_embeddings", 2048),
        fc_bias="fc.bias" in tensors,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=bool(config.get("norm_before_fc", False)),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
    )


def draft_vocabulary(tensors: Mapping[str, Tensor], config: HeadConfig) -> Tensor | None:
    """Returns (Vd,) int64 target ids of the draft ids, or None where they coincide.

    `d2t` is an offset: target id = draft id + d2t[draft id]. `t2d` must agree with it.

    Raises:
        ValueError: if the map is missing, out of range, unsorted or inconsistent.
    """
    if config.draft_vocab_size == config.vocab_size:
        return None
    if "d2t" not in tensors:
        raise ValueError(f"the head drafts {config.draft_vocab_size} of {config.vocab_size} tokens but has no d2t")
    offsets = tensors["d2t"].to(torch.int64)
    if offsets.shape != (config.draft_vocab_size,):
        raise ValueError(f"d2t has shape {tuple(offsets.shape)}, expected ({config.draft_vocab_size},)")
    ids = offsets + torch.arange(config.draft_vocab_size)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or not bool((ids.diff() > 0).all()):
        raise ValueError(
            f"d2t must map to increasing target ids in 0 … {config.vocab_size - 1}; is it absolute, not offset?"
        )
    if "t2d" in tensors:
        member = torch.zeros(config.vocab_size, dtype=torch.bool)
        member[ids] = True
        if not torch.equal(member, tensors["t2d"].to(torch.bool)):
            raise ValueError("t2d and d2t name different tokens")
    return ids


def read_head(folder: str | Path, target: TargetShape, dtype: torch.dtype = torch.float32) -> DraftHead:
    """Reads a head; every missing or unexpected tensor is an error that names it.

    Args:
        folder: folder with config.json and model.safetensors or pytorch_model.bin.
        target: sizes of the target.
        dtype: dtype of the head's weights in memory.

    Raises:
        ValueError: for anything that is not exactly a head for this target.
    """
    folder = Path(folder)
    raw, tensors = read_config(folder), read_tensors(folder)
    config = head_config(raw, tensors, target)
    network = build_network(config).to(dtype)
    extra = {"embed_tokens.weight", "d2t", "t2d", "layers.0.self_attn.rotary_emb.inv_freq"}
    given = {name: tensor for name, tensor in tensors.items() if name not in extra}
    expected = network.state_dict()
    missing, unexpected = (
        sorted(expected.keys() - given.keys()),
        sorted(given.keys() - expected.keys()),
    )
    if missing or unexpected:
        raise ValueError(f"{folder}: missing tensors {missing[:5]}, unexpected tensors {unexpected[:5]}")
    for name, parameter in expected.items():
        if parameter.shape != given[name].shape:
            raise ValueError(
                f"{folder}: {name} has shape {tuple(given[name].shape)}, expected {tuple(parameter.shape)}"
            )
        if not bool(torch.isfinite(given[name]).all()):
            raise ValueError(f"{folder}: {name} holds NaN or infinity")
        with torch.no_grad():
            parameter.copy_(given[name])
    embedding = tensors.get("embed_tokens.weight")
    if embedding is None and config.hidden_size != target.hidden_size:
        raise ValueError(f"{folder}: a head of another width than its target needs embed_tokens.weight")
    return DraftHead(
        network=network.eval(),
        draft_to_target=draft_vocabulary(tensors, config),
        embedding=None if embedding is None else embedding.to(dtype),
        target_fingerprint=raw.get("aquiline_target_fingerprint"),
    )


def config_to_json(config: HeadConfig, *, fingerprint: str | None, dtype: torch.dtype) -> dict[str, Any]:
    """Returns config.json of a head; `bias` false and both rope keys, which engines misread otherwise."""
    layer = config.layer
    eagle3 = config.kind == "eagle3"
    result: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if eagle3 else "LlamaForCausalLM"],
        "model_type": "llama",
        "bias": config.fc_bias,
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
        "rope_theta": layer.rope.theta,
        "rope_parameters": {"rope_theta": layer.rope.theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
    }
    if layer.qkv_bias:
        result["qkv_bias"] = True
    if config.target_hidden_size != layer.hidden_size:
        result["target_hidden_size"] = config.target_hidden_size
    if eagle3:
        result["draft_vocab_size"] = config.draft_vocab_size
        result["eagle_aux_hidden_state_layer_ids"] = list(config.features)
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if getattr(config, flag):
            result[flag] = True
    if fingerprint:
        result["aquiline_target_fingerprint"] = fingerprint
    return result


def write_head(folder: str | Path, head: DraftHead, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes a head as model.safetensors and config.json, each atomically.

    Args:
        folder: made if it does not exist.
        head: what to write; embeddings only if they are the head's own.
        dtype: dtype of the stored weights.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = head.config
    tensors = {name: t.detach().to(dtype).contiguous() for name, t in head.network.state_dict().items()}
    if head.draft_to_target is not None:
        ids = head.draft_to_target.to(torch.int64).cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids] = True
    if head.embedding is not None:
        tensors["embed_tokens.weight"] = head.embedding.detach().to(dtype).contiguous()
    text = json.dumps(config_to_json(config, fingerprint=head.target_fingerprint, dtype=dtype), indent=2)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        save_file(tensors, Path(scratch) / "model.safetensors", metadata={"format": "pt"})
        (Path(scratch) / "config.json").write_text(text + "\n")
        for name in ("model.safetensors", "config.json"):
            os.replace(Path(scratch) / name, folder / name)
