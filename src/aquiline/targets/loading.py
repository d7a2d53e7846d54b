"""Loads a target from a local model folder."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from aquiline.models.files import read_json
from aquiline.models.resolve import check_target_folder, tensor_entries, weight_files
from aquiline.models.tensors import read_tensors
from aquiline.targets.decoder import FAMILIES, FAMILY_DEFAULTS, Decoder, DecoderConfig, config_from_hf, load_state
from aquiline.targets.rope import max_positions
from aquiline.targets.target import Target, TargetShape

logger = logging.getLogger("aquiline")


def is_supported(folder: Path) -> bool:
    """True if our own decoder supports the family of the model in a folder; its settings may still be unsupported."""
    file = folder / "config.json"
    config = read_json(file) if file.is_file() else {}
    return config.get("model_type") in FAMILIES and not config.get("quantization_config")


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
    shapes = {name: tuple(facts["shape"]) for file in weight_files(folder) for name, *_, facts in tensor_entries(file)}
    _check_claims(folder, config, shapes)
    own = None
    if config.get("model_type") in FAMILIES and not config.get("quantization_config"):
        own = _own_config(folder, config)
    if own is None:
        return _load_with_transformers(folder, dtype, device, place)
    _check_shapes(folder, own, shapes)
    decoder = _load_decoder(folder, own, dtype, device)
    if place:
        place(decoder)
    return decoder


def _own_config(folder: Path, config: dict[str, Any]) -> DecoderConfig | None:
    """Returns the configuration of our own decoder, or None if it does not support a setting."""
    try:
        return config_from_hf(config)
    except ValueError:
        return None
    except KeyError as error:
        raise ValueError(f"{folder / 'config.json'} lacks {error}; fetch it again") from error
    except TypeError as error:
        raise ValueError(f"{folder / 'config.json'} has a value of the wrong type ({error}); fetch it again") from error


def target_shape(folder: str | Path) -> TargetShape:
    """Reads a target's sizes from its config.json, without loading it; of a multimodal target, the text model's.

    Raises:
        ValueError: if there is no config.json, or it names no sizes.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a target's folder: it has no config.json")
    config = read_json(path)
    text = config.get("text_config") or {}
    if not isinstance(text, dict):
        raise ValueError(f"{path} says text_config = {text!r}, expected an object; is it a language model?")
    config = {**config, **text}
    config = {"max_position_embeddings": 2048, **FAMILY_DEFAULTS.get(str(config.get("model_type")), {}), **config}
    sizes: list[int] = []
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
        size = config.get(key)
        if type(size) is not int or size < 1:
            raise ValueError(f"{path} says {key} = {size!r}, expected a number ≥ 1; is it a language model?")
        sizes.append(size)
    vocabulary, hidden, layers, _ = sizes
    return TargetShape(vocabulary, hidden, layers, max_positions(config))


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
    file = folder / "config.json"
    for name in _SIZES:
        value = config.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{file}: {name} is {value!r}; allowed: an integer ≥ 1; fetch it again")
    for name in ("rms_norm_eps", "rope_theta"):
        _check_positive(f"{file}: {name} is", config.get(name, 1))
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if not isinstance(rope, dict | None):
            raise ValueError(f"{file}: {name} is {rope!r}; allowed: an object; fetch it again")
        for part in [rope or {}, *(value for value in (rope or {}).values() if isinstance(value, dict))]:
            needed = _ROPE_NEEDS.get(str(part.get("rope_type", part.get("type"))), ())
            for key in _ROPE_NUMBERS:
                if part.get(key) is not None or key in needed:
                    _check_positive(f"{file}: {name} has {key} =", part.get(key))
    if not isinstance(config.get("model_type"), str):
        raise ValueError(f"{file}: model_type is {config.get('model_type')!r}; allowed: a name; fetch it again")


def _check_positive(place: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{place} {value!r}; allowed: a number > 0; fetch it again")


_ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ROPE_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

_MIXED = "the files belong to different models: fetch the folder again"


def _check_claims(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Rejects sizes that the weights cannot hold, before anything is allocated for them."""
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    claims = {name: config.get(name) for name in ("num_hidden_layers", "vocab_size", "hidden_size")}
    layers, vocabulary, hidden = (size if type(size) is int else 1 for size in claims.values())
    # A stored element has at most 64 bits, and a quantised weight at least 1.
    stored = 64 * sum(math.prod(shape) for shape in shapes.values())
    if layers > len(shapes) or vocabulary * hidden > stored:
        raise ValueError(
            f"{folder / 'config.json'} says {', '.join(f'{name} {size}' for name, size in claims.items())}, more than "
            f"the {len(shapes)} tensors of its weights can hold; {_MIXED}"
        )


def _check_shapes(folder: Path, config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compares the sizes in a config.json with the weights' headers, so that a false one allocates nothing."""
    layer, found = config.layer, {name.removeprefix("model."): shape for name, shape in shapes.items()}
    numbers = {int(name.split(".")[1]) for name in found if re.match(r"layers\.\d{1,9}\.", name)}
    if numbers and len(numbers) != config.num_layers:
        raise ValueError(
            f"{folder / 'config.json'} says num_hidden_layers {config.num_layers}, the weights have {len(numbers)} "
            f"layers; {_MIXED}"
        )
    expected = {
        "embed_tokens.weight": (config.vocab_size, layer.hidden_size),
        "layers.0.mlp.gate_proj.weight": (layer.intermediate_size, layer.hidden_size),
        "layers.0.self_attn.q_proj.weight": (layer.num_heads * layer.head_dim, layer.hidden_size),
        "layers.0.self_attn.k_proj.weight": (layer.num_kv_heads * layer.head_dim, layer.hidden_size),
    }
    for name, shape in expected.items():
        if name in found and found[name] != shape:
            raise ValueError(f"{folder}: {name} has shape {found[name]}, expected {shape} by config.json; {_MIXED}")


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


def _load_decoder(folder: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    tensors = _read_tensors(folder)
    head, embedding = (tensors.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if config.tied and head is not None and embedding is not None and not torch.equal(head, embedding):
        logger.warning(
            "%s says tie_word_embeddings, but the file's lm_head.weight differs from the embedding; it is used",
            folder / "config.json",
        )
        config = replace(config, tied=False)
    with torch.device(device), _Unfilled(dtype):
        decoder = Decoder(config).to(dtype)
    load_state(decoder, tensors, str(folder))
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
            raise ValueError(f"transformers cannot load {folder} ({str(error).strip().splitlines()[0]})") from error
        kind = read_json(folder / "config.json").get("model_type")
        raise ValueError(
            f"{folder} is not a causal language model (model_type {kind!r}); allowed: models that "
            "AutoModelForCausalLM loads"
        ) from error
    except (OSError, LookupError, RuntimeError, AttributeError, TypeError, ImportError, StrictDataclassError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = "install the package" if isinstance(error, ImportError) else "fetch it again"
        raise ValueError(f"transformers cannot load {folder} ({reason}); {remedy}") from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers initialises these randomly.
        raise ValueError(f"{folder} lacks the tensors {missing[:5]} of {type(model).__name__}; fetch it again")
    model = model.to(device).eval()
    if place:
        place(model)
    return HFTarget(model)
