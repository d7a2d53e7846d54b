"""Opens draft heads of every kind; only `open_head` decides which one a folder or file holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from aquiline.checkpoints.eagle.config_kinds import check_kinds
from aquiline.checkpoints.eagle.reading import HeadChoices, read_eagle
from aquiline.checkpoints.eagle.stored import StoredHead, head_from_stored
from aquiline.checkpoints.parallel import (
    StoredHeads,
    is_parallel,
    published_repository,
    read_parallel,
    read_published,
)
from aquiline.checkpoints.report import TITLES, HeadReport, fits
from aquiline.drafters.eagle_network import DraftHead
from aquiline.drafters.small_model import check_tokens
from aquiline.models.files import inside, read_json, user_path
from aquiline.models.hub import fetch, is_hub_id
from aquiline.models.resolve import target_fingerprint, tensor_entries, weight_files
from aquiline.targets.loading import target_shape
from aquiline.targets.target import TargetShape

SHIPPED = Path(__file__).parent.parent / "heads"
"""Draft heads that come with the package."""

_HUB_FILES = ("*.json", "*.safetensors", "*.bin", "*.pt")


@dataclass(frozen=True, eq=False)
class Head:
    """A draft head as its files hold it, checked.

    Attributes:
        kind: "eagle" (EAGLE-1/2), "eagle3", "medusa", "hydra" or "small-model".
        contents: tensors in their stored dtypes with their vocabulary map; None for a small model, which is loaded
            like a target.
        report: how the files were understood, and which target the head was trained for.
        config: config.json as it was read; empty for a GGUF file.
    """

    path: Path
    kind: str
    contents: StoredHead | StoredHeads | None
    report: HeadReport
    config: Mapping[str, Any] = field(default_factory=dict)


def open_head(name: str | Path, target: TargetShape | None = None, choices: HeadChoices | None = None) -> Head:
    """Opens a draft head of any kind and layout; missing, extra and invalid parts are errors.

    Args:
        name: as `resolve_head`.
        target: sizes of the target; None checks the head against itself alone.
        choices: settings that override an EAGLE checkpoint where it is silent or wrong.

    Raises:
        ValueError: for anything that is not exactly a head for this target; names the file, the key, what was
            expected and the remedy.
        RuntimeError: if the download fails.
    """
    path = resolve_head(name)
    config = {} if path.is_file() else _read_config(path)
    repository = None if path.is_file() else published_repository(path)
    contents: StoredHead | StoredHeads | None = None
    if repository is not None:
        contents, report = read_published(path, config, repository, target)
    elif is_parallel(config):
        contents, report = read_parallel(path, config, target)
    elif path.is_dir() and _holds_model(path):
        report = _model_report(path, config, target)
    else:
        contents, report = read_eagle(path, config, target, choices or HeadChoices())
        return Head(path, report.kind, contents, report, config)
    if choices is not None and choices != HeadChoices():
        raise ValueError(f"{path} holds {TITLES[report.kind]} heads, which allow no overrides; leave the options out")
    return Head(path, report.kind, contents, report, config)


def read_head(name: str | Path, target: TargetShape, dtype: torch.dtype = torch.float32) -> DraftHead:
    """Opens an EAGLE head and builds its network, with weights in `dtype`.

    Raises:
        ValueError: as `open_head`, or for a head of another kind.
    """
    return head_from_stored(stored_eagle(open_head(name, target)), dtype)


def stored_eagle(head: Head) -> StoredHead:
    """Returns the tensors of an EAGLE head.

    Raises:
        ValueError: if the head is of another kind.
    """
    if not isinstance(head.contents, StoredHead):
        raise ValueError(
            f"{head.path} is of kind {head.kind!r}; allowed: eagle, eagle3; heads of other kinds run in Aquiline only"
        )
    return head.contents


def stored_heads(head: Head) -> StoredHeads | None:
    """Returns the tensors of Medusa or Hydra heads; None for a head of another kind."""
    return head.contents if isinstance(head.contents, StoredHeads) else None


def resolve_head(name: str | Path) -> Path:
    """Returns the folder or GGUF file of a head.

    Tried in this order: a folder, a training's output folder (its ``head``), a GGUF file, the
    name of a shipped head, a hub id (from a filled cache also offline).

    Raises:
        ValueError: if no head has that name.
        RuntimeError: if the download fails.
    """
    if name == "":  # which would mean the current folder
        raise ValueError("the draft head is ''; allowed: a folder, a GGUF file, a hub id or a shipped head")
    path = user_path(name)
    if path.is_dir():
        inner = path / "head"
        return inner if inner.is_dir() and not (path / "config.json").is_file() else path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is not a draft head; of single files only .gguf is read: give its folder")
        return path
    text = str(name)
    if "/" not in text and (SHIPPED / text / "config.json").is_file():
        return SHIPPED / text
    if is_hub_id(text):
        return fetch(text, _HUB_FILES, _read_config)
    shipped = ", ".join(path.name for path in _shipped()) or "none for now"
    raise ValueError(
        f"unknown draft head {text!r}: no file or folder of that name; allowed: a head's folder, a GGUF file, a hub id "
        f"(organisation/name), or a shipped head ({shipped}); drafts without a head are auto, none, prompt-lookup, "
        "lookahead"
    )


def shipped_for(target: Path | None) -> list[Path]:
    """Returns the shipped heads trained for exactly the target in a folder; EAGLE-3, which drafts best, first."""
    heads = _shipped()
    if target is None or not heads:
        return []
    fingerprint = target_fingerprint(target)
    return [head for head in heads if read_json(head / "config.json").get("aquiline_target_fingerprint") == fingerprint]


def trained_for(head: Head, target: Path) -> bool | None:
    """Returns True if a head was trained for exactly the target in a folder, None if the head does not say."""
    recorded = head.report.fingerprint
    return None if recorded is None else recorded == target_fingerprint(target)


def _shipped() -> list[Path]:
    return sorted(
        (config.parent for config in SHIPPED.glob("*/config.json")), key=lambda p: ("eagle3" not in p.name, p)
    )


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} is not a draft head: it has no config.json")
    return read_json(inside(folder, "config.json"), "fetch the head again")


def _holds_model(folder: Path) -> bool:
    """Returns True for a folder with a whole language model: it has tensor names that no head has."""
    try:
        files = [inside(folder, file.name) for file in sorted(folder.glob("*.safetensors"))]
        names = {name for file in files for name, *_ in tensor_entries(file)}
    except ValueError:
        return False  # the reader of the head names what is broken
    return "model.embed_tokens.weight" in names and not names & {"fc.weight", "model.fc.weight"}


def _model_report(folder: Path, config: Mapping[str, Any], target: TargetShape | None) -> HeadReport:
    shape = target_shape(folder)
    if target is not None:
        check_tokens(shape, target)
    check_kinds({"aquiline_gamma": config.get("aquiline_gamma")}, str(folder))
    files = weight_files(folder)
    facts = [entry[-1] for file in files for entry in tensor_entries(file)]
    return HeadReport(
        path=str(folder),
        kind="small-model",
        dialect="transformers",
        files=("config.json", *(file.name for file in files)),
        config=shape,
        dtype=" and ".join(sorted({str(fact["dtype"]) for fact in facts})),
        parameters=sum(torch.Size(fact["shape"]).numel() for fact in facts),
        features="none: it reads the text",
        vocabulary=f"{shape.vocab_size} tokens",
        embedding="its own",
        fingerprint=config.get("aquiline_target_fingerprint"),
        gamma=config.get("aquiline_gamma"),
        checked_against=fits(target),
    )
