"""Holds EAGLE heads as tensors and configuration, between their files and their networks.

Readers produce a `StoredHead` and writers consume it, so that tensors keep their stored dtype and bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aquiline.checkpoints.eagle.config_kinds import NORM_FLAGS, check_sizes
from aquiline.drafters.eagle_network import DraftHead, HeadConfig, build_network
from aquiline.models import tensors as tensor_rules
from aquiline.targets.layers import LayerConfig
from aquiline.targets.rope import RopeConfig, rope_from_hf
from aquiline.targets.target import Feature, TargetShape

_FLAGS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}


@dataclass(frozen=True, eq=False)
class StoredHead:
    """A head independent of any file format.

    Attributes:
        tensors: exactly the names of the network's state dict, in stored dtypes.
        draft_to_target: (Vd,) int64 increasing target ids, or None where they coincide.
        embedding: (V, H_draft) the head's own embedding, or None.
        fingerprint: of the target that it was trained for, or None.
        gamma: exponent of its probabilities in coupled drafts, > 0; None if not measured.
        window: committed positions that it sees, up to twice as many; None: all.
    """

    config: HeadConfig
    tensors: Mapping[str, Tensor]
    draft_to_target: Tensor | None = None
    embedding: Tensor | None = None
    fingerprint: str | None = None
    gamma: float | None = None
    window: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrices (norms may be stored wider)."""
        return self.tensors["fc.weight"].dtype

    @property
    def parameters(self) -> int:
        """Number of weights, the embedding included."""
        own = 0 if self.embedding is None else self.embedding.numel()
        return own + sum(tensor.numel() for tensor in self.tensors.values())


def stored_from_head(head: DraftHead, dtype: torch.dtype) -> StoredHead:
    """Returns the tensors of a head in `dtype`."""
    embedding = head.embedding
    return StoredHead(
        config=head.config,
        tensors={name: t.detach().cpu().to(dtype).contiguous() for name, t in head.network.state_dict().items()},
        draft_to_target=None if head.draft_to_target is None else head.draft_to_target.cpu(),
        embedding=None if embedding is None else embedding.detach().cpu().to(dtype).contiguous(),
        fingerprint=head.target_fingerprint,
        gamma=head.gamma,
        window=head.window,
    )


def head_from_stored(stored: StoredHead, dtype: torch.dtype) -> DraftHead:
    """Builds the network, with weights in `dtype`, in evaluation mode."""
    with torch.device("meta"):
        network = build_network(stored.config)
    weights = {name: tensor.to(dtype, copy=True).contiguous() for name, tensor in stored.tensors.items()}
    network.load_state_dict(weights, strict=True, assign=True)
    return DraftHead(
        network=network.eval(),
        draft_to_target=stored.draft_to_target,
        embedding=None if stored.embedding is None else stored.embedding.to(dtype),
        target_fingerprint=stored.fingerprint,
        gamma=stored.gamma,
        window=stored.window,
    )


def head_config(
    kind: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: TargetShape | None,
    features: tuple[Feature, ...],
    place: str,
) -> HeadConfig:
    """Derives the network's configuration from a flat config.json and the tensors' names.

    Args:
        tensors: as read; they decide where the network has biases.
        target: the target that the head is meant for, or None to check nothing against it.

    Raises:
        ValueError: if a size is missing or the head does not fit the target; says which.
    """
    _check_target(config, target, place)
    try:
        return _head_config(kind, config, tensors, features)
    except ValueError as error:
        raise ValueError(f"{place}: config.json: {error}") from error


def _head_config(
    kind: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], features: tuple[Feature, ...]
) -> HeadConfig:
    inputs = config.get("aquiline_inputs") or "feature+shifted"
    if inputs != "feature+shifted":
        raise ValueError(f"aquiline_inputs is {inputs!r}, an ablation that cannot draft; train the head again")
    eagle3 = kind == "eagle3"
    layer = _layer_config(kind, config, tensors)
    return HeadConfig(
        kind=kind,
        layer=layer,
        vocab_size=config["vocab_size"],
        draft_vocab_size=(config.get("draft_vocab_size") or config["vocab_size"]) if eagle3 else config["vocab_size"],
        target_hidden_size=config.get("target_hidden_size") or config["hidden_size"],
        features=features,
        num_layers=config.get("num_hidden_layers") or 1,
        max_positions=config.get("max_position_embeddings") or 2048,
        fc_bias="fc.bias" in tensors,
        **{flag: bool(config.get(flag, False)) for flag in NORM_FLAGS},
    )


def check_tensors(config: HeadConfig, tensors: Mapping[str, Tensor], place: str) -> None:
    """Raises ValueError unless `tensors` are exactly the network's, finite, and of its shapes."""
    with torch.device("meta"):
        expected = build_network(config).state_dict()

    def explain(fault: str, name: str, tensor: Tensor | None) -> str:
        if fault == "missing":
            return f"expected {_remedy(name, config)}"
        return _shape_hint(name, tensor, config) if tensor is not None else _excess(name)

    tensor_rules.check_tensors(expected, tensors, place, explain)


def _check_target(config: Mapping[str, Any], target: TargetShape | None, place: str) -> None:
    check_sizes(config, place)
    if target is None:
        return
    width = config.get("target_hidden_size") or config["hidden_size"]
    if width != target.hidden_size:
        raise ValueError(
            f"{place}: the head was made for a target with hidden_size {width}, this target has {target.hidden_size}; "
            "use the head of this target"
        )
    if config["vocab_size"] != target.vocab_size:
        raise ValueError(
            f"{place}: the head was made for a target with vocab_size {config['vocab_size']}, this target has "
            f"{target.vocab_size}; use the head of this target"
        )


def _layer_config(kind: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LayerConfig:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    first = "midlayer." if kind == "eagle3" else "layers.0."
    for key in ("qkv_bias", "attention_bias"):
        if config.get(key) and f"{first}self_attn.q_proj.bias" not in tensors:
            raise ValueError(f"it says {key}, but {first}self_attn.q_proj.bias is missing; fetch the head again")
    return LayerConfig(
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=config.get("rms_norm_eps") or 1e-6,
        rope=_rope(config, head_dim),
        qkv_bias=f"{first}self_attn.q_proj.bias" in tensors,
        o_bias=f"{first}self_attn.o_proj.bias" in tensors,
        mlp_bias=f"{first}mlp.gate_proj.bias" in tensors,
        qk_norm=f"{first}self_attn.q_norm.weight" in tensors,
        activation=config.get("hidden_act") or "silu",
    )


def _rope(config: Mapping[str, Any], head_dim: int) -> RopeConfig:
    inner = (config.get("rope_parameters") or {}).get("rope_theta")
    outer = config.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(
            f"it says rope_theta {outer} and rope_parameters.rope_theta {inner}; engines read "
            "either, keep the one that the head was trained with in both"
        )
    given = {key: value for key, value in config.items() if value is not None}
    for key in ("rope_parameters", "rope_scaling"):
        given[key] = {name: value for name, value in (config.get(key) or {}).items() if value is not None}
    rope = rope_from_hf(given, head_dim)
    named = ("rope_theta", "rope_type", "type")
    return replace(rope, scaling={key: value for key, value in (rope.scaling or {}).items() if key not in named})


def _remedy(name: str, config: HeadConfig) -> str:
    if name == "lm_head.weight":
        return "the head's own LM head; one that borrows the target's (SGLang without draft_vocab_size) is not read"
    if name.startswith(("fc_norm", "input_norm")):
        return "the norms that config.json announces; its flags or the file belong to another head"
    return f"the tensors of an {'EAGLE-3' if config.kind == 'eagle3' else 'EAGLE-1/2'} head; fetch the head again"


def _excess(name: str) -> str:
    for flag, tensor in _FLAGS.items():
        if name == tensor:
            return f'config.json does not say "{flag}": true, so engines would ignore it; set it if the head has it'
    return "fetch the head again, or ask its author which method it is"


def _shape_hint(name: str, tensor: Tensor, config: HeadConfig) -> str:
    other = "its sizes in config.json or the file belong to another head: fetch the head again"
    if tensor.dim() != 2:
        return other
    if name == "lm_head.weight" and tensor.shape[0] == config.vocab_size:
        return (
            "it has a row for each target token, so the embedding was probably written over the LM head "
            "(tie_word_embeddings true while saving)"
        )
    if name == "lm_head.weight" and tensor.shape[0] < config.draft_vocab_size == config.vocab_size:
        return (
            f"it drafts {tensor.shape[0]} tokens, but config.json names no draft_vocab_size or the target's: write "
            f'"draft_vocab_size": {tensor.shape[0]}'
        )
    if name == "fc.weight" and config.kind == "eagle3" and tensor.shape[1] % config.target_hidden_size == 0:
        read = tensor.shape[1] // config.target_hidden_size
        return f"it reads {read} features, config.json names {len(config.features)}"
    return other
