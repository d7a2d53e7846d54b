"""Reads and writes Medusa and Hydra heads, in this package's layout and those of the reference repositories.

| file | names |
|---|---|
| `model.safetensors` (this package) | those of the network, and `d2t` for a reduced vocabulary |
| `medusa_lm_head.pt` | head i: `i.j.linear.*` blocks, then `i.n.weight`, its LM head |
| `hydra_lm_head.pt` | `hydra_mlp.i.j.linear.*`, `hydra_mlp.i.0.res_connection.*`, `hydra_lm_head.i.*` |

Blocks that the repositories repeat are one module under several names: the copies are equal.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.checkpoints.eagle.config_kinds import check_kinds
from aquiline.checkpoints.eagle.vocabulary import offsets, resolve_vocabulary
from aquiline.checkpoints.report import HeadReport, fits
from aquiline.drafters.parallel import ParallelHeads
from aquiline.drafters.parallel_network import (
    HydraNetwork,
    MedusaNetwork,
    ParallelConfig,
    ParallelNetwork,
    PublishedHydraNetwork,
    PublishedMedusaNetwork,
)
from aquiline.models.files import inside
from aquiline.models.tensors import check_tensors, is_there, read_tensors, read_weights, write_folder
from aquiline.targets.target import TargetShape

FORMAT = "aquiline-final-heads-1"
_OPTIONAL = {"num_blocks", "own_lm_head", "rms_norm_eps", "accuracies"}
_REPOSITORIES = {"medusa": "FasterDecoding/Medusa", "hydra": "zankner/Hydra"}
_FILES = {
    "medusa": ("medusa_lm_head.pt", "medusa_lm_head.safetensors"),
    "hydra": ("hydra_lm_head.pt", "hydra_lm_head.safetensors"),
}


@dataclass(frozen=True, eq=False)
class StoredHeads:
    """Medusa or Hydra heads as configuration and tensors, between their files and their network.

    Attributes:
        tensors: exactly the names of the network's state dict, in stored dtypes.
        draft_to_target: (Vd,) int64 increasing target ids, or None where draft and target ids coincide.
        fingerprint: of the target that they were trained for, or None.
        gamma: exponent of their probabilities in coupled drafts, > 0; None if not measured.
        published: each head has an LM head of its own, as the reference repositories train them.
    """

    config: ParallelConfig
    tensors: Mapping[str, Tensor]
    make: Callable[[ParallelConfig], ParallelNetwork]
    draft_to_target: Tensor | None = None
    fingerprint: str | None = None
    gamma: float | None = None
    published: bool = False


def build_parallel_network(config: ParallelConfig) -> ParallelNetwork:
    """Makes the network of a configuration; its heads start as the identity."""
    return MedusaNetwork(config) if config.kind == "medusa" else HydraNetwork(config)


def heads_from_stored(stored: StoredHeads, dtype: torch.dtype, device: torch.device | str = "cpu") -> ParallelHeads:
    """Builds the network, with weights in `dtype`, frozen and in evaluation mode."""
    with torch.device("meta"):
        network = stored.make(stored.config)
    weights = {name: t.to(device, dtype, copy=True).contiguous() for name, t in stored.tensors.items()}
    network.load_state_dict(weights, strict=True, assign=True)
    mapping = None if stored.draft_to_target is None else stored.draft_to_target.to(device)
    return ParallelHeads(network.eval().requires_grad_(False), mapping, stored.fingerprint, stored.gamma)


def is_parallel(config: Mapping[str, Any]) -> bool:
    """Returns True for a config.json of Medusa or Hydra heads of this package."""
    return str(config.get("format", "")).startswith("aquiline-final-heads")


def published_repository(folder: Path) -> str | None:
    """Returns "medusa" or "hydra" for a folder in that repository's layout, else None."""
    return next((name for name, files in _FILES.items() if any(is_there(folder, file) for file in files)), None)


def read_parallel(folder: Path, raw: Mapping[str, Any], target: TargetShape | None) -> tuple[StoredHeads, HeadReport]:
    """Reads heads in this package's layout.

    Args:
        target: sizes of the target; None checks the heads against themselves alone.

    Raises:
        ValueError: for anything that is not exactly such heads for this target.
    """
    place = str(folder)
    config = _config(raw, place)
    if target is not None and (config.hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
        raise ValueError(
            f"{place}: the heads were made for a target with hidden_size {config.hidden_size} and vocab_size "
            f"{config.vocab_size}, this target has {target.hidden_size} and {target.vocab_size}; use the heads of "
            "this target"
        )
    read, files = read_weights(folder)
    tensors = dict(read)
    ids, origin = resolve_vocabulary(tensors.pop("d2t", None), None, config.draft_vocab_size, config.vocab_size, place)
    fingerprint = raw.get("aquiline_target_fingerprint")
    gamma = raw.get("aquiline_gamma")
    stored = StoredHeads(config, tensors, build_parallel_network, ids, fingerprint, gamma)
    _check(stored, place)
    drafts = f"{config.draft_vocab_size} tokens ({origin})"
    return stored, _report(folder, "aquiline", ("config.json", *files), stored, drafts, target)


def read_published(
    folder: Path, raw: Mapping[str, Any], repository: str, target: TargetShape | None
) -> tuple[StoredHeads, HeadReport]:
    """Reads Medusa or Hydra heads as their authors publish them.

    Args:
        raw: its config.json, which does not name the target's sizes.
        repository: from `published_repository`.
        target: sizes of the target; None takes those of the heads' LM heads.

    Raises:
        ValueError: for anything that is not exactly such heads for this target.
    """
    check_kinds(raw, str(folder))
    file = next(name for name in _FILES[repository] if is_there(folder, name))
    tensors, place = read_tensors(inside(folder, file)), str(folder / file)
    config = _published_config(repository, raw, target or _own_shape(tensors, place), str(folder / "config.json"))
    make, rename = _published_network(repository, raw, config.num_blocks)
    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        raise ValueError(f"{place}: two tensors have one meaning, so it holds two sets of heads; fetch the heads again")
    stored = StoredHeads(config, renamed, make, published=True)
    _check(stored, place)
    drafts = f"{config.vocab_size} tokens (each head has an LM head of its own)"
    return stored, _report(folder, _REPOSITORIES[repository], ("config.json", file), stored, drafts, target)


def write_parallel_heads(folder: str | Path, heads: ParallelHeads, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes Medusa or Hydra heads, each file whole or not at all."""
    tensors = {name: t.detach().to(dtype).cpu() for name, t in heads.network.state_dict().items()}
    if heads.draft_to_target is not None:
        tensors["d2t"] = offsets(heads.draft_to_target).to(torch.int32)
    config: dict[str, Any] = {"format": FORMAT, "architectures": [type(heads.network).__name__]}
    config |= dataclasses.asdict(heads.config)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    if heads.target_fingerprint:
        config["aquiline_target_fingerprint"] = heads.target_fingerprint
    if heads.gamma is not None:
        config["aquiline_gamma"] = heads.gamma
    write_folder(folder, config, tensors)


def _config(raw: Mapping[str, Any], place: str) -> ParallelConfig:
    if raw.get("format") != FORMAT:
        raise ValueError(
            f"{place}: config.json says format = {raw.get('format')!r}, expected {FORMAT!r}; update aquiline"
        )
    check_kinds(raw, place)
    fields = {field.name for field in dataclasses.fields(ParallelConfig)}
    lost = sorted(fields - _OPTIONAL - raw.keys())
    if lost:
        raise ValueError(f"{place}/config.json lacks {', '.join(lost)}; train the heads again")
    given = {name: raw[name] for name in fields & raw.keys()}
    given["accuracies"] = tuple(tuple(row) for row in given.get("accuracies", ()))
    try:
        return ParallelConfig(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: config.json: {error}; train the heads again") from error


def _check(stored: StoredHeads, place: str) -> None:
    with torch.device("meta"):
        expected = stored.make(stored.config).state_dict()

    def explain(fault: str, name: str, tensor: Tensor | None) -> str:
        if fault == "shape" and stored.published:
            return "that follows from the target's sizes: use the heads of this target"
        return "the numbers of heads and blocks in config.json or the file belong to other heads: fetch them again"

    check_tensors(expected, stored.tensors, place, explain)


def _report(
    folder: Path,
    dialect: str,
    files: tuple[str, ...],
    stored: StoredHeads,
    drafts: str,
    target: TargetShape | None,
) -> HeadReport:
    kind = stored.config.kind
    return HeadReport(
        path=str(folder),
        kind=kind,
        dialect=dialect,
        files=files,
        config=stored.config,
        dtype=" and ".join(sorted({str(t.dtype).removeprefix("torch.") for t in stored.tensors.values()})),
        parameters=sum(tensor.numel() for tensor in stored.tensors.values()),
        features="final, after the final norm" + (", with the tokens of the path" if kind == "hydra" else ", alone"),
        vocabulary=drafts,
        embedding="the target's" if kind == "hydra" else "none: they read no tokens",
        fingerprint=stored.fingerprint,
        gamma=stored.gamma,
        checked_against=fits(target),
    )


def _own_shape(tensors: Mapping[str, Tensor], place: str) -> TargetShape:
    """Reads the target's sizes from the heads' LM heads, (V, H), the tallest matrices."""
    matrices = [tensor for tensor in tensors.values() if tensor.dim() == 2]
    if not matrices:
        raise ValueError(f"{place} holds no matrices; fetch the heads again")
    vocab, hidden = max((tuple(tensor.shape) for tensor in matrices), key=lambda shape: (shape[0], -shape[1]))
    return TargetShape(vocab, hidden, 1, 1)


def _published_config(repository: str, raw: Mapping[str, Any], target: TargetShape, place: str) -> ParallelConfig:
    counts = []
    for key in (f"{repository}_num_heads", f"{repository}_num_layers"):
        value = raw.get(key)
        if not value:
            raise ValueError(f"{place} says {key} = {value!r}, expected a number ≥ 1; fetch the heads again")
        counts.append(value)
    if repository == "hydra":
        architecture = raw.get("hydra_head_arch", "mlp")
        if architecture != "mlp":
            raise ValueError(
                f"{place} says hydra_head_arch = {architecture!r}; only 'mlp' is read: the others run a decoder layer "
                "of the target's sizes, which the checkpoint does not name"
            )
        if raw.get("hidden_state_offset"):
            raise ValueError(f"{place} says hidden_state_offset = {raw['hidden_state_offset']}; only 0 is read")
    return ParallelConfig(
        # Hydra's ungrounded heads read the feature alone, as Medusa's do.
        kind="hydra" if repository == "hydra" and raw.get("grounded_heads") else "medusa",
        num_heads=counts[0],
        num_blocks=counts[1],
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
    )


def _published_network(
    repository: str, raw: Mapping[str, Any], blocks: int
) -> tuple[Callable[[ParallelConfig], ParallelNetwork], Callable[[str], str]]:
    """Returns functions that make the network and translate a tensor's name."""

    def medusa_name(name: str) -> str:
        name = re.sub(rf"^(\d+)\.{blocks}\.(weight)$", r"lm_heads.\1.\2", name)
        return re.sub(r"^(\d+)\.(\d+)\.linear\.", r"heads.\1.\2.linear.", name)

    def hydra_name(name: str) -> str:
        return name.replace("hydra_mlp.", "heads.").replace("hydra_lm_head.", "lm_heads.")

    if repository == "medusa":
        return PublishedMedusaNetwork, medusa_name
    if raw.get("grounded_heads"):
        return PublishedHydraNetwork, hydra_name
    return lambda config: PublishedMedusaNetwork(config, lm_bias=True), hydra_name
