"""Settings of a renewal, kept in its folder, so that the training processes and later starts read them there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aquiline.models.files import read_json, write_text
from aquiline.models.resolve import target_fingerprint
from aquiline.renew.versions import add_version, serve_version, versions
from aquiline.training.stream import open_sets

LEAST_TOKENS = 30_000
"""Answer tokens of new conversations that are worth a training."""

LONGEST = 2048
"""Tokens of the longest conversation that is trained on and measured: longer ones take too much memory and time."""


@dataclass(frozen=True)
class RenewSettings:
    """A renewal.

    Attributes:
        target: folder of the target.
        fingerprint: of the target, see `target_fingerprint`.
        data: training sets of the original mixture.
        depth: longest chain that the server drafts.
        dtype: in which the target serves; None: its default.
        device: where the target serves.
        train: fields of `TrainSettings` that replace those of `aquiline.renew.slices.train_settings`.
    """

    target: str
    fingerprint: str
    data: tuple[str, ...]
    depth: int
    dtype: str | None = None
    device: str = "cpu"
    train: Mapping[str, Any] = field(default_factory=dict)


_KINDS: Mapping[str, Any] = {
    "target": str, "fingerprint": str, "data": list, "depth": int, "dtype": str | None, "device": str, "train": dict,
}  # fmt: skip
"""Setting → its kind in JSON."""


def read_settings(folder: Path) -> RenewSettings:
    """Reads the settings of a renewal.

    Raises:
        ValueError: if the folder holds none, or damaged ones.
    """
    file, remedy = folder / "settings.json", "begin a renewal in another folder"
    if not file.is_file():
        raise ValueError(f"{folder} holds no renewal; make one with `aquiline serve --renew {folder} --renew-data SET`")
    found = read_json(file, remedy)
    wrong = [name for name in _KINDS.keys() | found if not isinstance(found.get(name), _KINDS.get(name, ()))]
    if wrong or not all(isinstance(path, str) for path in found["data"]):
        raise ValueError(f"{file} has a wrong {', '.join(sorted(wrong)) or 'data'}; {remedy}")
    return RenewSettings(**{**found, "data": tuple(found["data"])})


def open_renewal(folder: Path, target: Path, head: Path, settings: Mapping[str, Any]) -> RenewSettings:
    """Opens a renewal, or begins one whose first version is a copy of the served head.

    Args:
        target: folder of the target.
        head: folder of the head.
        settings: further fields of `RenewSettings`; empty `data` keeps the sets of an earlier start.

    Raises:
        ValueError: if the folder is a file or renews the head of another target, or the original data is not known,
            damaged, empty or of another tokenizer.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"renew is {str(folder)!r}, a file; allowed: a folder, which is made if missing")
    fingerprint, before = target_fingerprint(target), None
    if (folder / "settings.json").is_file():
        before = read_settings(folder)
        if before.fingerprint != fingerprint:
            raise ValueError(f"{folder} renews a head of {before.target}, another target; choose another folder")
    data = tuple(str(Path(path).resolve()) for path in settings["data"]) or (before.data if before else ())
    if not data:
        raise ValueError(
            "renew_data is missing; give training sets of the head's original data, made by `aquiline prepare`: a "
            "head that trains on served conversations alone forgets other texts"
        )
    if not head.is_dir():
        raise ValueError(f"{head} is a file; allowed: a head's folder, which a version can copy")
    open_sets(target, data, data)  # a training hours later is too late to find a set missing
    kept = {"train": before.train} if before else {}
    made = RenewSettings(str(target.resolve()), fingerprint, **{**kept, **settings, "data": data})
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_text(folder / "settings.json", json.dumps(asdict(made), indent=2))
    if not versions(folder):
        serve_version(folder, add_version(folder, head, None).number, "begin")
    return made
