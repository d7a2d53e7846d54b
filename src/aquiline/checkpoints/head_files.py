"""The files of a draft head: config.json and tensors, read without trusting them.

A head comes from strangers. Nothing outside its folder is opened, nothing in a pickle is run, and
a file that is cut, doubled or of the wrong kind is an error that names it.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDEXED = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_FETCH = "fetch the head again"


@dataclass(frozen=True, eq=False)
class HeadFiles:
    """What lies in a head's folder.

    Attributes:
        folder: the folder.
        config: config.json.
        tensors: name → tensor, in its stored dtype.
        names: the files that were read.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    names: tuple[str, ...]


def read_head_files(folder: str | Path) -> HeadFiles:
    """Reads config.json and all tensors of a head's folder.

    Args:
        folder: with config.json and one of model.safetensors, model.safetensors.index.json with
            its shards, pytorch_model.bin, pytorch_model.bin.index.json with its shards.

    Raises:
        ValueError: what is missing, broken or leads out of the folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; a draft head is a folder with config.json and its weights")
    config = read_config(folder)
    for name in _WHOLE:
        if (folder / name).exists() or (folder / name).is_symlink():
            return HeadFiles(folder, config, read_tensors(inside(folder, name)), ("config.json", name))
    for name in _INDEXED:
        if (folder / name).exists() or (folder / name).is_symlink():
            tensors, shards = _read_shards(folder, name)
            return HeadFiles(folder, config, tensors, ("config.json", name, *shards))
    raise ValueError(f"{folder} holds no weights: none of {', '.join(_WHOLE + _INDEXED)} is there; {_FETCH}")


def read_config(folder: str | Path) -> dict[str, Any]:
    """Reads config.json of a head's folder.

    Raises:
        ValueError: if it is missing or is not a JSON object.
    """
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} is not a draft head: it has no config.json")
    return read_json(inside(folder, "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ValueError: if it is something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {_FETCH}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds a {type(document).__name__}, expected an object")
    return document


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a file of the folder, after checking that it does not lead out of it.

    The blob store beside a model hub snapshot counts as inside: there, all files are links.

    Raises:
        ValueError: for a name with a folder in it, a link that leaves, or no regular file.
    """
    if Path(name).name != name or name in ("", ".", "..") or "\\" in name or not name.isprintable() or len(name) > 255:
        raise ValueError(f"{folder}: the file name {name[:80]!r} leaves the folder or is none; expected a plain name")
    path = folder / name
    try:
        real, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"{path} is a link that leads nowhere ({error}); copy the file itself into the folder"
        ) from error
    roots = [home]
    if home.parent.name == "snapshots" and home.parent.parent.name.startswith("models--"):
        roots.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(root) for root in roots):
        raise ValueError(f"{path} is a link that leaves the folder (to {real}); copy the file itself into it")
    if not real.is_file():
        raise ValueError(f"{path} is not a file; {_FETCH}")
    return path


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads one file of tensors, .safetensors or a pickle without code.

    Raises:
        ValueError: if it is cut or corrupt, or a pickle holds anything but tensors.
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
    except (SafetensorError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is not whole or not a file of tensors ({error}); {_FETCH}") from error
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, expected a mapping of names to tensors")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(f"{path}: {name!r} is a {type(value).__name__}, expected a tensor under a name")
        if value.layout != torch.strided:
            raise ValueError(f"{path}: {name} is stored as {value.layout}, expected a dense tensor; {_FETCH}")
    return {name: value.detach() for name, value in loaded.items()}


def _read_shards(folder: Path, index: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    weight_map = read_json(inside(folder, index)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{folder / index} has no weight_map of tensor names to file names; {_FETCH}")
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
