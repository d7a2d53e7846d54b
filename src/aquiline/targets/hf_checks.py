"""Reads a transformers model's settings before it runs, and rejects unsupported models by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aquiline.targets.rope import max_positions, rope_changes

_BACKENDS = ("sdpa", "eager")
_NO_ATTENTION = ("moe", "mlp", "dense", "sparse")
# `layer_types` that describe the MLP, not the attention.


def unwrap(model: Any) -> Any:
    """Returns the transformers model inside a PEFT wrapper, or `model` itself.

    Adapters inside the layers (LoRA and similar) stay active.

    Raises:
        ValueError: for prompt learning, which only the wrapper applies.
    """
    inner = getattr(model, "get_base_model", None)
    if inner is None:
        return model
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"{type(model).__name__} learns a prompt outside the model, which Aquiline's cache cannot hold; "
            "allowed: adapters inside the layers such as LoRA"
        )
    return inner()


def check_model(model: Any) -> None:
    """Rejects models that cannot verify a tree.

    Raises:
        TypeError: if `model` is not a transformers model.
        ValueError: with the reason and the remedy.
    """
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        raise TypeError(f"{name} is not a transformers model; give a causal LM loaded with AutoModelForCausalLM")
    if model.training:
        raise ValueError(f"{name} is in training mode, where dropout may be active; call model.eval() first")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; allowed: decoder-only causal language models")
    if config.get_text_config() is not config:
        raise ValueError(
            f"{name} wraps a text model for several modalities; load the text model alone (its …ForCausalLM class)"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no LM head; load it with AutoModelForCausalLM")
    _check_cache(model, name)
    backend = getattr(config, "_attn_implementation", None) or "eager"
    if backend not in _BACKENDS:
        raise ValueError(
            f"{name} uses attn_implementation={backend!r}, which cannot take the mask of a tree; "
            "load it with attn_implementation='sdpa' or 'eager'"
        )
    if getattr(config, "alibi", False) or "position_ids" not in inspect.signature(base_model(model).forward).parameters:
        raise ValueError(
            f"{name} derives positions from its mask, which a tree mask cannot encode; allowed: position_ids"
        )


def _check_cache(model: Any, name: str) -> None:
    from aquiline.targets.hf_cache import unsupported_layers

    kinds = getattr(model.config, "layer_types", None) or ()
    odd = ", ".join(sorted(set(kinds) - {"full_attention", "sliding_attention", *_NO_ATTENTION}))
    if getattr(model, "_is_stateful", False):
        reason = f"layers of type {odd}" if odd else "a recurrent state (linear attention or Mamba)"
        raise ValueError(
            f"{name} has {reason}, whose cache cannot roll back rejected drafts; decode it with transformers"
        )
    if odd or hasattr(model.config, "attention_types"):
        raise ValueError(
            f"{name} has layers of type {odd or 'local'}, whose mask a tree cannot express; "
            "allowed: full_attention and sliding_attention; decode it with transformers"
        )
    layers = unsupported_layers(model.config)
    if layers:
        raise ValueError(f"{name} caches more than keys and values ({', '.join(layers)}); decode it with transformers")


def base_model(model: Any) -> Any:
    """Returns a causal LM without its head."""
    base = model.base_model
    return base if base is not model else model.get_decoder()


def window_size(config: Any) -> int | None:
    """Returns the sliding window in a configuration, if any."""
    for name in ("sliding_window", "local_attention"):
        size = getattr(config, name, None)
        if size is not None:
            return int(size)
    return None


def mask_windows(config: Any) -> dict[str, int | None]:
    """Returns layer type → declared sliding window or None; one entry "" if all layers share one mask.

    The probe decides later whether the model applies the declared window.
    """
    window = window_size(config)
    kinds = set(getattr(config, "layer_types", None) or ()) - set(_NO_ATTENTION)
    windows = {kind: window if kind == "sliding_attention" else None for kind in kinds}
    if not windows:
        return {"": window}
    distinct = set(windows.values())
    return windows if len(distinct) > 1 else {"": distinct.pop()}


def position_limit(config: Any) -> tuple[int, bool]:
    """Returns the context length, and whether the rotary frequencies change beyond it.

    See `aquiline.targets.rope.max_positions`.
    """
    names = ("max_position_embeddings", "original_max_position_embeddings", "rope_parameters", "rope_scaling")
    settings = {name: getattr(config, name, None) for name in names}
    if settings["max_position_embeddings"] is None:
        raise ValueError(f"the configuration of {config.model_type} lacks max_position_embeddings; set it")
    return max_positions(settings), rope_changes(settings)


def head_rule(config: Any) -> Callable[[Tensor], Tensor]:
    """Returns the operations on the LM head's output that a configuration names; the probe confirms them.

    Cohere multiplies, Granite divides, Gemma soft-caps with c · tanh(x / c), all in the dtype of the logits.
    """
    names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
    factor, divisor, cap = (getattr(config, name, None) for name in names)

    def apply(logits: Tensor) -> Tensor:
        if factor is not None:
            logits = logits * factor
        if divisor is not None:
            logits = logits / divisor
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return apply
