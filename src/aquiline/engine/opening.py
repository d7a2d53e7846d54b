"""Opens a target by name: model, tokenizer, end tokens and sampling defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from aquiline.checks import check_kind
from aquiline.models.files import read_json
from aquiline.native.codes import GROUPS
from aquiline.native.library import find_library
from aquiline.sampling import SamplingParams
from aquiline.targets.packed import fast_bfloat16
from aquiline.targets.target import Target

logger = logging.getLogger("aquiline")


def open_target(
    target: Any, tokenizer: Any, dtype: torch.dtype | str | None, device: str | torch.device
) -> tuple[Path | None, Target, Any]:
    """Returns a target's folder (None for a model passed as an object), its model and its tokenizer.

    Args:
        target: alias, model folder, GGUF file, hub id, a transformers model or a `Target`.
        tokenizer: the user's tokenizer; None uses the one in the folder.
        dtype: of the weights; None chooses a fast one.

    Raises:
        TypeError: for a target of any other type.
        ValueError: for an unknown name, or a dtype or device that is unavailable or differs from
            that of a model passed as an object.
    """
    from aquiline.models.resolve import resolve_target
    from aquiline.models.tokenizer import load_tokenizer
    from aquiline.targets.loading import is_supported, load_target

    if not isinstance(target, str | Path):
        return None, _as_given(target, dtype, device), tokenizer
    path = resolve_target(target)
    place = _existing(_device(device))
    model = load_target(path, weights_dtype(dtype, place, own=is_supported(path)), place)
    return path, model, load_tokenizer(path) if tokenizer is None else tokenizer


def _as_given(target: Any, dtype: torch.dtype | str | None, device: str | torch.device) -> Target:
    """Wraps a model passed as an object."""
    from aquiline.targets.hf import target_from_hf

    if not hasattr(target, "new_cache") and not isinstance(target, torch.nn.Module):
        raise TypeError(
            f"target is a {type(target).__name__}; allowed: an alias, a folder, a GGUF file, a hub id, a "
            "transformers model, or a Target"
        )
    model: Target = target if hasattr(target, "new_cache") else target_from_hf(target)
    _check_given(model, dtype, device)
    return model


def _check_given(target: Target, dtype: torch.dtype | str | None, device: str | torch.device) -> None:
    """Rejects a dtype or device that differs from the model's: a model passed as an object is not moved."""
    if dtype is not None and weights_dtype(dtype, device) != target.dtype:
        raise ValueError(
            f"dtype is {dtype}, but the model is in {target.dtype}; convert the model first, and omit dtype"
        )
    # The default device says nothing about the model's.
    if _device(device).type not in ("cpu", target.device.type):
        raise ValueError(
            f"device is {device}, but the model is on {target.device}; move the model first, and omit device"
        )


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}; allowed: 'cpu', 'cuda', 'cuda:1', …") from error


def _existing(device: torch.device) -> torch.device:
    there = torch.cuda.device_count()
    if device.type == "meta" or (device.type == "cuda" and (device.index or 0) >= there):
        raise ValueError(f"device is '{device}', and PyTorch sees {there} CUDA devices; allowed: 'cpu', …")
    return device


def weights_dtype(dtype: torch.dtype | str | None, device: str | torch.device, own: bool = True) -> torch.dtype:
    """Returns the dtype of a target's weights: as asked, else a fast one of the device.

    Args:
        dtype: None for the fast one.
        device: where the target runs.
        own: our own decoder runs it, whose kernels read bfloat16 fast on every CPU.

    Raises:
        ValueError, TypeError: not a floating-point dtype or the name of one.
    """
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    if dtype is not None:
        check_kind("dtype", dtype, isinstance(dtype, str | torch.dtype), "a dtype or its name")
        named: dict[Any, torch.dtype] = {
            "float32": torch.float32,
            "bfloat16": torch.bfloat16,
            "float16": torch.float16,
            "float64": torch.float64,
            # Of the cache and the features: these name the weights, see `fast_form`.
            **dict.fromkeys(GROUPS, torch.bfloat16),
        }
        if dtype not in named:
            raise ValueError(f"dtype {dtype!r} is not known; allowed: {', '.join(named)}")
        return named[dtype]
    where = _device(device)
    if fast_bfloat16(where):
        return torch.bfloat16
    if where.type != "cpu":
        return torch.float16
    return torch.bfloat16 if own and find_library()[0] else torch.float32


def fast_form(target: Target, owned: bool, dtype: torch.dtype | str | None = None) -> Target:
    """Returns our own decoder in the form that is fast on its device: on a CPU a native or else a packed copy.

    Args:
        target: the target; any but our own decoder is returned as it is.
        owned: the weights were loaded here; a user's model is not joined, which would store its weights twice.
        dtype: "int8" and "int4" quantise the weights.

    Raises:
        ValueError: for integer weights without the native kernels or for another target.

    Mutates: on other devices, joins the target's projections.
    """
    from aquiline.targets.decoder import Decoder
    from aquiline.targets.native import native
    from aquiline.targets.packed import packed

    if dtype in GROUPS:
        made = native(target, form=dtype) if isinstance(target, Decoder) else None
        if made is None:
            raise integers_refused(str(dtype), target)
        return made
    if not isinstance(target, Decoder):
        return target
    if target.device.type == "cpu":
        return native(target) or packed(target) or target
    if owned:
        target.join()
    return target


def static_form(target: Target, packed: bool, compiled: bool) -> Target:
    """Returns our own decoder in forwards of few shapes, with CUDA graphs where there is CUDA.

    Args:
        target: a decoder on the CPU and any other target is returned as it is.
        packed: the target is in the form that is fast on its device.
        compiled: compile the forwards.

    Raises:
        ValueError: for `compiled` where it has no effect.
    """
    from aquiline.targets.decoder import Decoder
    from aquiline.targets.static import StaticDecoder

    on_cpu = target.device.type == "cpu"
    if compiled and (not isinstance(target, Decoder) or (on_cpu and packed)):
        raise ValueError(
            f"compile is True, which has no effect on this target ({type(target).__name__}, {target.device}, packed "
            f"{packed}); allowed: our own decoder on a GPU, or with packed=False on the CPU, where the native kernels "
            "and packed weights are faster and not compiled"
        )
    if not isinstance(target, Decoder) or not (compiled or (packed and not on_cpu)):
        return target
    return StaticDecoder(target, "inductor" if compiled else None)


def integers_refused(dtype: str, target: Target) -> ValueError:
    """The error for integer weights that cannot be had."""
    return ValueError(
        f"dtype is {dtype!r}, which needs the native kernels ({find_library()[1]}), our own decoder (this is a "
        f"{type(target).__name__}), the CPU (not {target.device}) and packed=True; use bfloat16 or float32"
    )


def check_exact(target: Target) -> None:
    """Raises ValueError unless a token's bits are independent of the rest of its forward."""
    if not target.exact:
        raise ValueError(
            f"exact is True, but this target ({type(target).__name__}, {target.dtype}, {target.device}) rounds by the "
            f"shape of the forward; allowed: our own decoder in bfloat16 or float32 on the CPU kernels, with packed "
            f"(kernels: {find_library()[1]})"
        )


def generation_defaults(path: Path | None, target: Any, tokenizer: Any) -> tuple[tuple[int, ...], SamplingParams]:
    """Returns end tokens and sampling defaults: those that transformers would generate with.

    They come from generation_config.json, without it from config.json. The tokenizer's own end token is
    one of the ends.

    Raises:
        ValueError: for a value that is not allowed; names the file.
    """
    place, config = _generation_config(path, target)
    given, own = config.get("eos_token_id"), getattr(tokenizer, "eos_token_id", None)
    ends = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    if not all(type(token) is int for token in ends):
        raise ValueError(f"{place} has eos_token_id {given!r}; allowed: a token id, or a list of them")
    ids = tuple(dict.fromkeys([*ends, *([own] if type(own) is int else [])]))
    try:
        defaults = _sampling_defaults(config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place} is invalid: {error}") from error
    unknown = [name for name, off in _NOT_DONE.items() if config.get(name) not in (None, off)]
    if unknown:
        logger.warning("%s sets %s, which Aquiline does not have; it is left out", place, ", ".join(unknown))
    if defaults != SamplingParams():
        logger.info("the model's defaults: %s; pass your own settings to change them", defaults)
    return ids, defaults


def _generation_config(path: Path | None, target: Any) -> tuple[str, Mapping[str, Any]]:
    if path is None:
        config = getattr(target, "generation_config", None)
        return "the model's generation_config", {} if config is None else config.to_dict()
    file = path / "generation_config.json"
    if file.is_file():
        return str(file), read_json(file, "fetch or delete it")
    from aquiline.targets.decoder import FAMILY_DEFAULTS

    config = read_json(path / "config.json")
    family = FAMILY_DEFAULTS.get(str(config.get("model_type")), {})
    text = config.get("text_config")
    return str(path / "config.json"), {**family, **(text if isinstance(text, dict) else {}), **config}


_NOT_DONE = {
    "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "num_beams": 1, "bad_words_ids": [], "suppress_tokens": [], "begin_suppress_tokens": [],
    "sequence_bias": {}, "forced_bos_token_id": None, "forced_eos_token_id": None, "top_h": None,
    "exponential_decay_length_penalty": None, "guidance_scale": 1.0, "stop_strings": [], "penalty_alpha": None,
}  # fmt: skip
"""Settings of transformers that change its text and have no counterpart here → the value that turns them off."""


def _sampling_defaults(config: Mapping[str, Any]) -> SamplingParams:
    """Reads sampling settings; those left out have transformers' defaults."""

    def given(name: str, default: float) -> Any:
        value = config.get(name)
        return default if value is None else value

    always = {
        "repetition_penalty": given("repetition_penalty", 1.0),
        "min_new_tokens": given("min_new_tokens", 0),
    }
    samples = given("do_sample", False)
    if not isinstance(samples, bool):
        raise ValueError(f"do_sample is {samples!r}; allowed: true or false")
    if not samples:
        return SamplingParams(**always)
    return SamplingParams(
        **always,
        temperature=given("temperature", 1.0),
        top_k=given("top_k", 50),
        top_p=given("top_p", 1.0),
        min_p=given("min_p", 0.0),
    )
