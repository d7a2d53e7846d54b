"""Reads tensors from files without running code, and checks them key by key."""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.models.files import filling, inside, read_json

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDEXED = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_FETCH = "fetch it again"

Explain = Callable[[str, str, Tensor | None], str]
"""("missing", "unexpected" or "shape"; the tensor's name; the given tensor) → the remedy."""


def check_tensors(
    expected: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    place: str,
    explain: Explain | None = None,
    *,
    finite: bool = True,
) -> None:
    """Raises ValueError unless `given` has exactly the names and shapes of `expected`, in floating point.

    Args:
        expected: name → tensor of the right shape, for example a state dict on the meta device.
        place: where they were read, for messages.
        explain: writes the remedy for a fault; None advises to fetch the file again.
        finite: also reject NaN and infinity, which reads every value.
    """
    explain = explain or (lambda fault, name, tensor: f"the file belongs to another model or is damaged; {_FETCH}")
    for fault, names in (("missing", expected.keys() - given.keys()), ("unexpected", given.keys() - expected.keys())):
        if names:
            first, *rest = sorted(names)
            shown = ", ".join([first, *rest[:2]]) + (f" and {len(rest) - 2} more" if len(rest) > 2 else "")
            raise ValueError(f"{place}: {shown} {'are' if rest else 'is'} {fault}; {explain(fault, first, None)}")
    for name, tensor in given.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{place}: {name} has shape {tuple(tensor.shape)}, expected {tuple(expected[name].shape)}; "
                f"{explain('shape', name, tensor)}"
            )
        check_values(name, tensor, place, finite=finite)


def check_values(name: str, tensor: Tensor, place: str, *, finite: bool = True) -> None:
    """Raises ValueError unless a tensor holds floating-point weights, and with `finite` no NaN or infinity."""
    if tensor.dtype not in FLOATING:
        raise ValueError(
            f"{place}: {name} has dtype {tensor.dtype}, expected floating point; get the weights that are not quantised"
        )
    if finite and not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{place}: {name} holds NaN or infinity; the file is damaged, fetch it or train again")


def read_weights(folder: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Reads all tensors of a folder, in one file or in shards under an index.

    Returns:
        Name → tensor in its stored dtype, and the names of the files that were read.

    Raises:
        ValueError: if a file is missing, broken, or leads out of the folder.
    """
    for name in _WHOLE:
        if is_there(folder, name):
            return read_tensors(inside(folder, name)), (name,)
    for name in _INDEXED:
        if is_there(folder, name):
            tensors, shards = _read_shards(folder, name)
            return tensors, (name, *shards)
    raise ValueError(f"{folder} holds no weights: none of {', '.join(_WHOLE + _INDEXED)} is there; {_FETCH}")


def is_there(folder: Path, name: str) -> bool:
    """Returns True for an entry of a folder; broken links count, so that reading them names them."""
    return (folder / name).exists() or (folder / name).is_symlink()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads one file of tensors, .safetensors or a pickle without code.

    Raises:
        ValueError: if it is cut or corrupt, or a pickle with anything but tensors.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.name.endswith(".safetensors"):
            return dict(load_file(path))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the pickle's protocol
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's own message advises to load it with its code.
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"{path} is refused: it is a pickle with code in it{f', {found[1]}' if found else ''}, or not whole; "
            "ask its author for a .safetensors file"
        ) from error
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is not whole or not a file of tensors ({error}); {_FETCH}") from error
    return _only_tensors(loaded, path)


def write_folder(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes model.safetensors and config.json, each whole or not at all; makes the folder."""
    from safetensors.torch import save_file

    with filling(Path(folder)) as scratch:
        # Cloned: tensors of a pickle may share memory, which safetensors rejects.
        contiguous = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        save_file(contiguous, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _only_tensors(loaded: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, expected a mapping of names to tensors; {_FETCH}")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(f"{path}: {name!r} is a {type(value).__name__}, expected a tensor under a name; {_FETCH}")
        if value.layout != torch.strided:
            raise ValueError(f"{path}: {name} is stored as {value.layout}, expected a dense tensor; {_FETCH}")
    return {name: value.detach() for name, value in loaded.items()}


def read_weight_map(folder: Path, index: str) -> dict[str, str]:
    """Reads tensor name → file name from the index of a sharded checkpoint.

    Raises:
        ValueError: if it is broken, or a link leaves the folder.
    """
    weight_map = read_json(inside(folder, index)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{folder / index} has no weight_map of tensor names to file names; {_FETCH}")
    return weight_map


def _read_shards(folder: Path, index: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    weight_map = read_weight_map(folder, index)
    shards = tuple(sorted(set(weight_map.values())))
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        here = read_tensors(inside(folder, shard))
        for name in here:
            if weight_map.get(name) != shard:
                raise ValueError(f"{folder / shard} holds {name}, which {index} does not place there; {_FETCH}")
        tensors.update(here)
    lost = sorted(weight_map.keys() - tensors.keys())
    if lost:
        raise ValueError(f"{folder / weight_map[lost[0]]} lacks {lost[0]}, which {index} places there; {_FETCH}")
    return tensors, shards
