"""Medusa and Hydra heads on disk: config.json and model.safetensors, read strictly.

The layout is this package's own: the published Medusa and Hydra checkpoints belong to targets
and LM heads of their own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.checkpoints.config_kinds import check_kinds
from aquiline.checkpoints.eagle.stored import check_values
from aquiline.checkpoints.eagle.vocabulary import offsets, resolve_vocabulary
from aquiline.checkpoints.head_files import read_head_files
from aquiline.drafters.parallel import ParallelDrafter, ParallelHeads
from aquiline.drafters.parallel_network import HydraNetwork, MedusaNetwork, ParallelConfig, ParallelNetwork
from aquiline.drafters.trees import Chain, StaticTree
from aquiline.targets.target import Target, TargetShape

FORMAT = "aquiline-final-heads-1"


def build_final_network(config: ParallelConfig) -> ParallelNetwork:
    """Makes the network of a configuration; its heads begin as the identity."""
    return MedusaNetwork(config) if config.kind == "medusa" else HydraNetwork(config)


def is_final_heads(config: dict[str, Any]) -> bool:
    """Whether a config.json belongs to Medusa or Hydra heads of this package."""
    return config.get("format") == FORMAT


def read_final_heads(folder: str | Path, target: TargetShape, dtype: torch.dtype = torch.float32) -> ParallelHeads:
    """Reads Medusa or Hydra heads.

    Args:
        folder: with config.json and model.safetensors.
        target: sizes of the target.
        dtype: of the weights in memory.

    Raises:
        ValueError: for anything that is not exactly such heads for this target.
    """
    files = read_head_files(folder)
    place, raw = str(files.folder), dict(files.config)
    if not is_final_heads(raw):
        raise ValueError(f"{place} holds no Medusa or Hydra heads: its format is {raw.get('format')!r}, not {FORMAT!r}")
    check_kinds(raw, place)
    fields = {field.name for field in dataclasses.fields(ParallelConfig)}
    lost = sorted(fields - {"num_blocks", "own_lm_head", "rms_norm_eps", "accuracies"} - raw.keys())
    if lost:
        raise ValueError(f"{place}/config.json lacks {', '.join(lost)}; train the heads again")
    given = {name: raw[name] for name in fields & raw.keys()}
    given["accuracies"] = tuple(tuple(row) for row in given.get("accuracies", ()))
    try:
        config = ParallelConfig(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: config.json: {error}; train the heads again") from error
    if (config.hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
        raise ValueError(
            f"{place} was made for hidden_size {config.hidden_size} and vocab_size {config.vocab_size}, "
            f"this target has {target.hidden_size} and {target.vocab_size}"
        )
    tensors = dict(files.tensors)
    vocabulary = resolve_vocabulary(tensors.pop("d2t", None), None, config.draft_vocab_size, config.vocab_size, place)
    network = build_final_network(config).to(dtype)
    _fill(network, tensors, place)
    return ParallelHeads(network.eval().requires_grad_(False), vocabulary.ids, raw.get("aquiline_target_fingerprint"))


def _fill(network: ParallelNetwork, tensors: dict[str, Tensor], place: str) -> None:
    expected = network.state_dict()
    missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unexpected:
        raise ValueError(f"{place}: missing tensors {missing[:5]}, unexpected tensors {unexpected[:5]}")
    for name, parameter in expected.items():
        given = tensors[name]
        if given.shape != parameter.shape:
            raise ValueError(f"{place}: {name} has shape {tuple(given.shape)}, expected {tuple(parameter.shape)}")
        check_values(name, given, place)
        with torch.no_grad():
            parameter.copy_(given)


def write_final_heads(folder: str | Path, heads: ParallelHeads, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes Medusa or Hydra heads, each file atomically.

    Args:
        folder: made if it does not exist.
        heads: what to write.
        dtype: of the stored weights.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().to(dtype).contiguous().cpu() for name, t in heads.network.state_dict().items()}
    if heads.draft_to_target is not None:
        tensors["d2t"] = offsets(heads.draft_to_target).to(torch.int32)
    config: dict[str, Any] = {"format": FORMAT, "architectures": [type(heads.network).__name__]}
    config |= dataclasses.asdict(heads.config)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    if heads.target_fingerprint:
        config["aquiline_target_fingerprint"] = heads.target_fingerprint
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        save_file(tensors, Path(scratch) / "model.safetensors", metadata={"format": "pt"})
        (Path(scratch) / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name in ("model.safetensors", "config.json"):
            os.replace(Path(scratch) / name, folder / name)


def final_drafter(folder: str | Path, target: Target, policy: Chain | StaticTree | None = None) -> ParallelDrafter:
    """Reads Medusa or Hydra heads and makes their drafter, in the target's dtype.

    Args:
        folder: as `read_final_heads`.
        target: the target.
        policy: a chain or a static tree; None: the heads' own sparse tree.

    Raises:
        ValueError: for heads or a tree that do not fit.
    """
    heads = read_final_heads(folder, target.shape, target.dtype)
    heads.network.to(target.device)
    if heads.draft_to_target is not None:
        heads.draft_to_target = heads.draft_to_target.to(target.device)
    return ParallelDrafter(heads, target, policy)
