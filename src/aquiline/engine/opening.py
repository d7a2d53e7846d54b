"""Opens a target by name: model, tokenizer, end tokens and sampling defaults."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from aquiline.checks import check_kind
from aquiline.models.files import read_json
from aquiline.sampling import SamplingParams
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
        device: where the model runs.

    Raises:
        TypeError: for a target of any other type.
        ValueError: for an unknown name, or a dtype or device that is unavailable or differs from
            that of a model passed as an object.
    """
    from aquiline.models.resolve import resolve_target
    from aquiline.models.tokenizer import load_tokenizer
    from aquiline.targets.loading import load_target

    if not isinstance(target, str | Path):
        return None, _as_given(target, dtype, device), tokenizer
    path = resolve_target(target, logger.info)
    place = _existing(_device(device))
    model = load_target(path, weights_dtype(dtype, place), place)
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


def weights_dtype(dtype: torch.dtype | str | None, device: str | torch.device) -> torch.dtype:
    """Returns the dtype of a target's weights: as asked, else a fast one of the device.

    Raises:
        ValueError, TypeError: not a floating-point dtype or the name of one.
    """
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    if dtype is not None:
        check_kind("dtype", dtype, isinstance(dtype, str | torch.dtype), "a dtype or its name")
        named = {
            "float32": torch.float32,
            "bfloat16": torch.bfloat16,
            "float16": torch.float16,
            "float64": torch.float64,
        }
        if dtype not in named:
            raise ValueError(f"dtype {dtype!r} is not known; allowed: {', '.join(named)}")
        return named[str(dtype)]
    where = _device(device)
    if where.type != "cpu":
        # Before Ampere, bfloat16 is emulated; on MPS, by the first chips.
        ampere = where.type == "cuda" and torch.cuda.get_device_capability(where) >= (8, 0)
        return torch.bfloat16 if ampere else torch.float16
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported() if torch.backends.mkldnn.is_available() else False  # type: ignore[no-untyped-call]
    return torch.bfloat16 if fast else torch.float32


def fast_form(target: Target, exact: bool | None, owned: bool) -> Target:
    """Returns our own decoder in the form that is fast on its device: on a CPU a packed copy, if supported.

    Args:
        target: the target; any but our own decoder is returned as it is.
        exact: see `aquiline.targets.packed.packed`.
        owned: the weights were loaded here; a user's model is not joined, which would store its weights twice.

    Mutates: on other devices, joins the target's projections.
    """
    from aquiline.targets.decoder import Decoder
    from aquiline.targets.packed import packed

    if not isinstance(target, Decoder):
        return target
    if target.device.type == "cpu":
        return packed(target, exact) or target
    if owned:
        target.join()
    return target


def generation_defaults(path: Path | None, target: Any, tokenizer: Any) -> tuple[tuple[int, ...], SamplingParams]:
    """Returns end tokens and sampling defaults, from generation_config or else the tokenizer."""
    config: dict[str, Any] = {}
    if path is not None and (path / "generation_config.json").is_file():
        config = read_json(path / "generation_config.json", "fetch or delete it")
    elif hasattr(target, "generation_config") and target.generation_config is not None:
        config = target.generation_config.to_dict()
    end = config.get("eos_token_id")
    if end is None and tokenizer is not None:
        end = tokenizer.eos_token_id
    ids = tuple(end) if isinstance(end, list | tuple) else () if end is None else (end,)
    if not all(type(token) is int for token in ids):
        raise ValueError(f"generation_config has eos_token_id {end!r}; allowed: a token id, or a list of them")
    if not config.get("do_sample"):
        return ids, SamplingParams()
    try:
        sampled = SamplingParams(
            temperature=config.get("temperature") or 1.0,
            top_k=config.get("top_k") or 0,
            top_p=config.get("top_p") or 1.0,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"the model's generation_config is invalid: {error}") from error
    logger.info("the model's generation_config samples: %s; give temperature=0 for greedy output", sampled)
    return ids, sampled
