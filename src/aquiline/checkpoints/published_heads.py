"""Medusa and Hydra checkpoints of their reference repositories.

| file | names |
|---|---|
| `medusa_lm_head.pt` | head i: `i.j.linear.*` blocks, then `i.n.weight`, its LM head |
| `hydra_lm_head.pt` | `hydra_mlp.i.j.linear.*`, `hydra_mlp.i.0.res_connection.*`, `hydra_lm_head.i.*` |

Blocks that the repositories repeat are one module under several names: the copies are equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.checkpoints.config_kinds import check_kinds
from aquiline.checkpoints.eagle.stored import check_values
from aquiline.checkpoints.head_files import inside, read_config, read_tensors
from aquiline.drafters.parallel import ParallelHeads
from aquiline.drafters.parallel_network import (
    ParallelConfig,
    ParallelNetwork,
    PublishedHydraNetwork,
    PublishedMedusaNetwork,
)
from aquiline.targets.target import TargetShape

_FILES = {
    "medusa": ("medusa_lm_head.pt", "medusa_lm_head.safetensors"),
    "hydra": ("hydra_lm_head.pt", "hydra_lm_head.safetensors"),
}


def published_kind(folder: str | Path) -> str | None:
    """Returns "medusa" or "hydra" if a folder holds such a published checkpoint, else None."""
    for kind, names in _FILES.items():
        if any((Path(folder) / name).exists() or (Path(folder) / name).is_symlink() for name in names):
            return kind
    return None


@dataclass(frozen=True)
class PublishedReport:
    """How published heads were understood.

    Attributes:
        path: the folder.
        repository: whose layout it is, "Medusa" or "Hydra".
        file: name of the weights' file.
        config: the network's configuration.
        dtype: dtype of the stored weights.
        parameters: number of weights, the heads' LM heads included.
        checked: whether they were checked against a target.
    """

    path: str
    repository: str
    file: str
    config: ParallelConfig
    dtype: str
    parameters: int
    checked: bool

    def __str__(self) -> str:
        config = self.config
        reads = "the path's tokens" if config.kind == "hydra" else "the feature alone"
        rows = [
            ("heads", f"{config.num_heads}, {self.repository} checkpoint"),
            ("files", f"config.json, {self.file}"),
            ("network", f"{config.num_blocks} block(s) a head; {self.parameters / 1e6:.1f} M weights, {self.dtype}"),
            ("reads", f"{reads}, after the target's final norm"),
            ("target", f"hidden {config.hidden_size}, {config.vocab_size} tokens"),
            ("drafts", "all tokens, with an LM head for each head"),
            ("checked", "fits the target" if self.checked else "against itself only; give a target to check the fit"),
        ]
        return self.path + "".join(f"\n  {label:<12} {value}" for label, value in rows)


def inspect_published_heads(folder: str | Path, target: TargetShape | None = None) -> PublishedReport:
    """Explains published heads; with `target`, checks that they fit.

    Raises:
        ValueError: as `read_published_heads`.
    """
    return _read(Path(folder), target, torch.bfloat16)[1]


def read_published_heads(folder: str | Path, target: TargetShape, dtype: torch.dtype = torch.float32) -> ParallelHeads:
    """Reads Medusa or Hydra heads as their authors publish them.

    Args:
        folder: with config.json and the heads' file.
        target: sizes of the target, which config.json does not name.
        dtype: of the weights in memory.

    Raises:
        ValueError: for anything that is not exactly such heads for this target.
    """
    return ParallelHeads(_read(Path(folder), target, dtype)[0].eval().requires_grad_(False))


def _read(folder: Path, target: TargetShape | None, dtype: torch.dtype) -> tuple[ParallelNetwork, PublishedReport]:
    kind = published_kind(folder)
    if kind is None:
        names = ", ".join(name for files in _FILES.values() for name in files)
        raise ValueError(f"{folder} holds no published Medusa or Hydra heads: none of {names} is there")
    raw = read_config(folder)
    check_kinds(raw, str(folder))
    file = next(name for name in _FILES[kind] if (folder / name).exists() or (folder / name).is_symlink())
    tensors, place = read_tensors(inside(folder, file)), str(folder / file)
    config = _config(kind, raw, target or _own_shape(tensors, place), str(folder / "config.json"))
    with torch.device("meta"):
        network, names = _network(kind, raw, config)
    _fill(network, {names(name): tensor for name, tensor in tensors.items()}, dtype, place)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    count = sum(parameter.numel() for parameter in network.parameters())
    title = kind.capitalize()
    return network, PublishedReport(str(folder), title, file, config, " and ".join(dtypes), count, target is not None)


def _own_shape(tensors: Mapping[str, Tensor], place: str) -> TargetShape:
    """The target's sizes from the heads' LM heads, (V, H), the tallest matrices."""
    matrices = [tensor for tensor in tensors.values() if tensor.dim() == 2]
    if not matrices:
        raise ValueError(f"{place} holds no matrices; fetch the heads again")
    vocab, hidden = max((tuple(tensor.shape) for tensor in matrices), key=lambda shape: (shape[0], -shape[1]))
    return TargetShape(vocab, hidden, 1, 1)


def _config(kind: str, raw: Mapping[str, Any], target: TargetShape, place: str) -> ParallelConfig:
    counts = []
    for key in (f"{kind}_num_heads", f"{kind}_num_layers"):
        value = raw.get(key)
        if not value:
            raise ValueError(f"{place} says {key} = {value!r}, expected a number ≥ 1; fetch the heads again")
        counts.append(value)
    if kind == "hydra":
        architecture = raw.get("hydra_head_arch", "mlp")
        if architecture != "mlp":
            raise ValueError(
                f"{place} says hydra_head_arch = {architecture!r}; only 'mlp' is read: the others run a decoder layer "
                "of the target's sizes, which the checkpoint does not name"
            )
        if raw.get("hidden_state_offset"):
            raise ValueError(f"{place} says hidden_state_offset = {raw['hidden_state_offset']}; only 0 is read")
    return ParallelConfig(
        kind=kind if kind == "medusa" or raw.get("grounded_heads") else "medusa",
        num_heads=counts[0],
        num_blocks=counts[1],
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
    )


def _network(kind: str, raw: Mapping[str, Any], config: ParallelConfig) -> tuple[ParallelNetwork, Any]:
    blocks = config.num_blocks

    def medusa_name(name: str) -> str:
        name = re.sub(rf"^(\d+)\.{blocks}\.(weight)$", r"lm_heads.\1.\2", name)
        return re.sub(r"^(\d+)\.(\d+)\.linear\.", r"heads.\1.\2.linear.", name)

    def hydra_name(name: str) -> str:
        return name.replace("hydra_mlp.", "heads.").replace("hydra_lm_head.", "lm_heads.")

    if kind == "medusa":
        return PublishedMedusaNetwork(config), medusa_name
    if raw.get("grounded_heads"):
        return PublishedHydraNetwork(config), hydra_name
    return PublishedMedusaNetwork(config, lm_bias=True), hydra_name


def _fill(network: ParallelNetwork, tensors: Mapping[str, Tensor], dtype: torch.dtype, place: str) -> None:
    expected = network.state_dict()
    missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unexpected:
        raise ValueError(
            f"{place}: missing tensors {missing[:3]}, unexpected tensors {unexpected[:3]} (in this package's names); "
            "is the number of heads and layers in config.json that of the file?"
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{place}: {name} has shape {tuple(tensor.shape)}, expected {tuple(expected[name].shape)} "
                "from the target's sizes; use the heads of this target"
            )
        check_values(name, tensor, place)
    network.load_state_dict({name: t.to(dtype, copy=True) for name, t in tensors.items()}, strict=True, assign=True)
