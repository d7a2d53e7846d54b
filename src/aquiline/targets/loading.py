"""Loads a target from a local model folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from aquiline.models.files import read_json
from aquiline.models.resolve import check_target_folder, weight_files
from aquiline.models.tensors import read_tensors
from aquiline.targets.decoder import FAMILIES, Decoder, config_from_hf, load_state
from aquiline.targets.target import Target, TargetShape


def load_target(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    place: Callable[[nn.Module], None] | None = None,
) -> Target:
    """Loads the target in a folder, in our own decoder if it supports the family, else through transformers.

    Args:
        path: folder with config.json and safetensors weights, one file or sharded.
        dtype: of the weights in memory.
        device: where the weights go.
        place: moves or spreads the loaded weights, before a transformers model is probed.

    Raises:
        ValueError: for a missing, broken or contradictory file, with the remedy, and for a model
            that cannot be a target (see `aquiline.targets.hf.HFTarget`).
    """
    folder = Path(path)
    check_target_folder(folder)
    config = read_json(folder / "config.json")
    if config.get("is_encoder_decoder"):
        raise ValueError(
            f"{folder} is an encoder-decoder ({config.get('model_type')}); allowed: decoder-only causal language models"
        )
    _check_sizes(folder, config)
    if config.get("model_type") in FAMILIES and not config.get("quantization_config"):
        try:
            own = config_from_hf(config)
        except ValueError:
            return _load_with_transformers(folder, dtype, device, place)  # Our decoder does not support this setting.
        except KeyError as error:
            raise ValueError(f"{folder / 'config.json'} lacks {error}; fetch it again") from error
        except TypeError as error:
            raise ValueError(
                f"{folder / 'config.json'} has a value of the wrong type ({error}); fetch it again"
            ) from error
        decoder = _load_decoder(folder, own, dtype, device)
        if place:
            place(decoder)
        return decoder
    return _load_with_transformers(folder, dtype, device, place)


def target_shape(folder: str | Path) -> TargetShape:
    """Reads a target's sizes from its config.json, without loading it; of a multimodal target, the text model's.

    Raises:
        ValueError: there is no config.json, or it names no sizes.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a target's folder: it has no config.json")
    config = read_json(path)
    text = config.get("text_config") or {}
    if not isinstance(text, dict):
        raise ValueError(f"{path} says text_config = {text!r}, expected an object; is it a language model?")
    config = {"max_position_embeddings": 2048, **config, **text}
    sizes: list[int] = []
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
        size = config.get(key)
        if type(size) is not int or size < 1:
            raise ValueError(f"{path} says {key} = {size!r}, expected a number ≥ 1; is it a language model?")
        sizes.append(size)
    return TargetShape(*sizes)


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def _check_sizes(folder: Path, config: dict[str, Any]) -> None:
    """Rejects impossible sizes; each model family checks which sizes it needs."""
    for name in _SIZES:
        value = config.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{folder / 'config.json'}: {name} is {value!r}; allowed: an integer ≥ 1; fetch it again")
    for name in ("rms_norm_eps", "rope_theta"):
        value = config.get(name)
        if value is not None and (type(value) not in (int, float) or not value > 0):
            raise ValueError(f"{folder / 'config.json'}: {name} is {value!r}; allowed: a number > 0; fetch it again")
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict | None):
        raise ValueError(f"{folder / 'config.json'}: rope_parameters is {rope!r}; allowed: an object; fetch it again")


class _Unfilled(TorchFunctionMode):
    """Creates modules with allocated but uninitialised weights of one dtype.

    The usual way, the meta device, imports PyTorch's compiler, which adds a second to every start.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("dtype") is None:
            kwargs["dtype"] = self._dtype
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _load_decoder(folder: Path, config: Any, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    with torch.device(device), _Unfilled(dtype):
        decoder = Decoder(config).to(dtype)
    load_state(decoder, _read_tensors(folder), str(folder))
    return decoder.eval().requires_grad_(False)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        shard = read_tensors(file)
        twice = sorted(tensors.keys() & shard.keys())
        if twice:
            raise ValueError(f"{file} repeats the tensor {twice[0]} of another shard; fetch the folder again")
        tensors.update(shard)
    return tensors


def _load_with_transformers(
    folder: Path, dtype: torch.dtype, device: torch.device | str, place: Callable[[nn.Module], None] | None
) -> Target:
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    from aquiline.targets.hf import HFTarget

    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        kind = read_json(folder / "config.json").get("model_type")
        raise ValueError(
            f"{folder} is not a causal language model (model_type {kind!r}); allowed: models that "
            "AutoModelForCausalLM loads"
        ) from error
    except (OSError, KeyError, RuntimeError, StrictDataclassError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"transformers cannot load {folder} ({reason}); fetch it again") from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers initialises these randomly.
        raise ValueError(f"{folder} lacks the tensors {missing[:5]} of {type(model).__name__}; fetch it again")
    model = model.to(device).eval()
    if place:
        place(model)
    return HFTarget(model)
