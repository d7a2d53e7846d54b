"""Stores the target's features in a folder, which fills while training and which later epochs read."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from aquiline.models.files import check_room, replacing, write_text
from aquiline.targets.target import Feature
from aquiline.training.processes import say

_SHARD_BYTES = 256 << 20


def feature_stamp(
    fingerprint: str, features: Sequence[Feature], data: Mapping[str, str], max_length: int
) -> dict[str, Any]:
    """Identifies the inputs of a feature folder: target, features, data sets by name, and the cut."""
    return {
        "format": "aquiline-features-1",
        "target": fingerprint,
        "features": [str(f) for f in dict.fromkeys((*features, "final"))],
        "data": dict(sorted(data.items())),
        "max_length": max_length,
    }


@dataclass(eq=False)
class FeatureStore:
    """A folder of features that fills while training.

    Attributes:
        folder: where ``stamp.json`` and ``shard-*.safetensors`` lie.
        stamp: see `feature_stamp`; a folder with another stamp is rejected.
        written: conversation key → shard file.
        pending: features not yet on disk, lost (and recomputed) if the process dies.
        full: the disk had no room; nothing more is written.
    """

    folder: Path
    stamp: dict[str, Any]
    written: dict[str, Path] = field(default_factory=dict)
    pending: dict[str, Tensor] = field(default_factory=dict)
    full: bool = False
    _open: dict[Path, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def layout(self) -> tuple[Feature, ...]:
        """Features of a stored row, in order; "final" is always among them."""
        return tuple("final" if f == "final" else int(f) for f in self.stamp["features"])

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self.pending or key in self.written

    def get(self, key: str) -> Tensor | None:
        """Returns the (T, F) features of a conversation, or None where they are unknown."""
        from safetensors import safe_open

        with self._lock:
            if key in self.pending:
                return self.pending[key]
            path = self.written.get(key)
            if path is None:
                return None
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            tensor: Tensor = self._open[path].get_tensor(key)
            return tensor

    def put(self, key: str, features: Tensor) -> None:
        """Remembers features; writes a shard when enough are pending."""
        with self._lock:
            if self.full:
                return
            self.pending[key] = features
            if sum(t.nbytes for t in self.pending.values()) >= _SHARD_BYTES:
                self._flush()

    def flush(self) -> None:
        """Writes the pending features, atomically; on a full disk it prints a message and stops writing."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if not self.pending:
            return
        name = hashlib.sha256(" ".join(sorted(self.pending)).encode()).hexdigest()[:16]
        path = self.folder / f"shard-{name}.safetensors"
        size = sum(t.nbytes for t in self.pending.values())
        try:
            check_room(path, 4 * size)  # leaves some to the run's checkpoints
            with replacing(path) as scratch:
                save_file({k: t.contiguous() for k, t in self.pending.items()}, scratch)
        except (OSError, ValueError) as error:
            self.full = True
            self.pending.clear()
            say(f"feature folder {self.folder}: {error}; training continues without writing to it")
            return
        self.written.update(dict.fromkeys(self.pending, path))
        self.pending.clear()


def announce_room(store: FeatureStore, wanted: int) -> None:
    """Prints how large a folder becomes, before hours are spent on filling it.

    Args:
        store: the folder.
        wanted: bytes of all features that it may come to hold.

    Raises:
        ValueError: if the disk has no room for what is missing.
    """
    there = sum(path.stat().st_size for path in store.folder.glob("shard-*.safetensors"))
    free, missing = shutil.disk_usage(store.folder).free, max(0, wanted - there)
    sizes = f"up to {wanted / 1e9:.2f} GB, {there / 1e9:.2f} GB are there, {free / 1e9:.2f} GB are free"
    if missing > free:
        raise ValueError(
            f"features in {store.folder}: {sizes}; name a folder on a larger disk, use fewer conversations "
            "(limit_conversations), or leave features out"
        )
    say(f"features in {store.folder}: {sizes}")


def open_features(folder: str | Path, stamp: dict[str, Any]) -> FeatureStore:
    """Opens or starts a feature folder; it may hold further data sets, and new ones are added.

    Raises:
        ValueError: if the folder was made for another target, data or features.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stamp = _stamped(folder, stamp)
    store = FeatureStore(folder, stamp)
    for shard in sorted(folder.glob("shard-*.safetensors")):
        try:
            with safe_open(shard, framework="pt") as handle:
                store.written.update(dict.fromkeys(handle.keys(), shard))
        except SafetensorError as error:
            raise ValueError(f"{shard} is damaged ({error}); delete it") from error
    return store


def _stamped(folder: Path, stamp: dict[str, Any]) -> dict[str, Any]:
    """The stamp of a folder that serves a run with `stamp`, written where it was missing or grew."""
    path = folder / "stamp.json"
    if path.is_file():
        found = json.loads(path.read_text())
        if set(stamp["features"]) <= set(found.get("features", ())):
            stamp = stamp | {"features": found["features"]}  # an EAGLE-3 folder serves EAGLE-1
        known = found.get("data", {})
        if all(known[name] == digest for name, digest in stamp["data"].items() if name in known):
            stamp = stamp | {"data": dict(sorted((known | stamp["data"]).items()))}
            found = found | {"data": stamp["data"]}
        different = sorted(k for k in stamp.keys() | found.keys() if stamp.get(k) != found.get(k))
        if different:
            raise ValueError(
                f"the features in {folder} were made with another {', '.join(different)}; name an empty folder, or "
                "delete this one (name new training sets after the old ones, whose features are then kept)"
            )
    write_text(path, json.dumps(stamp, indent=2) + "\n")  # whole at any time: another process may read it now
    return stamp
