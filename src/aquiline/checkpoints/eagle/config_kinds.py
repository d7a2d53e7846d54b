"""Checks the types of the values in a head's config.json.

Later readers can rely on the types, and check only the meaning of the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Switches of EAGLE-3's norms, in config.json and in `HeadConfig` alike."""

_LARGEST = 2**31 - 1
_MOST_LAYERS = 128


@dataclass(frozen=True)
class _Kind:
    allowed: Callable[[Any], bool]
    name: str


def _is_integer(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, list) and all(map(_is_number, row)) for row in value)


_OBJECT = _Kind(lambda value: isinstance(value, Mapping), "an object")
_FLAG = _Kind(lambda value: type(value) is bool, "true or false")
_TEXT = _Kind(lambda value: isinstance(value, str), "a text")
_COUNT = _Kind(lambda value: _is_integer(value, _LARGEST), f"a positive number up to {_LARGEST}")
_FEW = _Kind(lambda value: _is_integer(value, _MOST_LAYERS), f"a number up to {_MOST_LAYERS}")
_POSITIVE = _Kind(lambda value: _is_number(value) and value > 0, "a number > 0")
_NUMBER = _Kind(_is_number, "a number")

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_KINDS: dict[str, _Kind] = {
    "architectures": _Kind(_is_texts, "a list of names"),
    "num_hidden_layers": _FEW,
    **dict.fromkeys(("model", "eagle_config", "transformer_layer_config", "rope_parameters", "rope_scaling"), _OBJECT),
    **dict.fromkeys(("hidden_act", "rope_type", "type", "aquiline_target_fingerprint", "aquiline_inputs"), _TEXT),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "partial_rotary_factor", "factor", "aquiline_gamma"), _POSITIVE),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"), _POSITIVE),
    **dict.fromkeys(("logit_scale", "mscale", "mscale_all_dim"), _NUMBER),
    **dict.fromkeys(("bias", "attention_bias", "qkv_bias", "eagle_fc_bias", "fusion_bias", "layernorms"), _FLAG),
    **dict.fromkeys((*NORM_FLAGS, "truncate", "tie_word_embeddings", "parallel_drafting"), _FLAG),
    **dict.fromkeys(("num_heads", "num_blocks", "medusa_num_heads", "medusa_num_layers"), _FEW),
    **dict.fromkeys(("hydra_num_heads", "hydra_num_layers", "hidden_state_offset"), _FEW),
    **dict.fromkeys(("own_lm_head", "grounded_heads"), _FLAG),
    "hydra_head_arch": _TEXT,
    "accuracies": _Kind(_is_table, "a list of lists of numbers"),
    # 0 stands for the default.
    **dict.fromkeys(("draft_vocab_size", "target_hidden_size", "num_key_value_heads", "head_dim"), _COUNT),
    "aquiline_window": _COUNT,
    **dict.fromkeys(
        ("max_position_embeddings", "original_max_position_embeddings", "hot_vocab_size", "truncated_vocab_size"),
        _COUNT,
    ),
}
_NESTED = ("eagle_config", "rope_parameters", "rope_scaling")
_SCALINGS = {"linear": ("factor",), "yarn": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}


def check_kinds(config: Mapping[str, Any], place: str, inside: str = "") -> None:
    """Raises ValueError for a value of the wrong type, here and in nested objects.

    None equals an absent key. `model` and `transformer_layer_config` become part of the flat
    configuration, which is checked later.

    Args:
        config: config.json, or an object inside it.
        place: the head's folder, for messages.
        inside: name of that object with a dot, for messages.
    """
    for key, value in config.items():
        kind = _KINDS.get(key)
        if kind is not None and value is not None and not kind.allowed(value):
            raise ValueError(
                f"{place}: config.json says {inside}{key} = {value!r}, expected {kind.name}, or no such key; correct "
                "it or fetch the head again"
            )
    for name in _NESTED:
        if isinstance(config.get(name), Mapping):
            check_kinds(config[name], place, f"{inside}{name}.")


def check_sizes(config: Mapping[str, Any], place: str) -> None:
    """Raises ValueError unless a flat configuration names the sizes of a network and they fit each other."""
    for key in _SIZES:
        value = config.get(key)
        if not _is_integer(value, _LARGEST) or not value:
            said = f"says {key} = {value!r}" if key in config else f"lacks {key!r}"
            raise ValueError(f"{place}: config.json {said}, expected {_COUNT.name}; take it from the target's config")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if head_dim < 2 or head_dim % 2:
        raise ValueError(
            f"{place}: config.json's hidden_size {config['hidden_size']} and num_attention_heads "
            f"{config['num_attention_heads']} give heads of width {head_dim}, expected an even number; name head_dim"
        )
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    for key in _SCALINGS.get(kind, ()):
        if scaling.get(key) is None:
            raise ValueError(
                f"{place}: config.json's rope scaling {kind!r} lacks {key!r}, expected a number; take it from the "
                "configuration that the head was trained with"
            )
