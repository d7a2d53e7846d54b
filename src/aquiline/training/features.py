"""Target features for training: computed without a cache, and kept on disk for later epochs.

A conversation's features are always computed alone, so that they do not depend on what was
batched with it, and a run with a feature folder has the same bits as one without.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.targets.decoder import Decoder
from aquiline.targets.layers import decoder_layers
from aquiline.targets.target import Feature, Target

_SHARD_BYTES = 256 << 20


@torch.no_grad()
def compute_features(target: Target, tokens: Tensor, features: Sequence[Feature]) -> Tensor:
    """Runs the target over one conversation.

    Args:
        target: the frozen target.
        tokens: (T,) int64.
        features: which features, concatenated on the last axis.

    Returns:
        (T, F) in the target's dtype.
    """
    if isinstance(target, Decoder) and all(window is None for window in target.config.windows):
        return _decoder_features(target, tokens, features)
    positions = torch.arange(len(tokens), device=tokens.device)[None]
    nothing = torch.zeros(1, 0, dtype=torch.int64, device=tokens.device)
    cache = target.new_cache(1, len(tokens))
    out = target.forward(tokens[None], positions, None, cache, [0], features, nothing)
    assert out.features is not None
    return out.features[0]


def _decoder_features(target: Decoder, tokens: Tensor, features: Sequence[Feature]) -> Tensor:
    """The decoder without its cache: fused causal attention, no logits."""
    width = len(tokens)
    positions = torch.arange(width, device=tokens.device)[None]
    cos, sin = target.rotary(positions, width)
    hidden = target.embed_tokens(tokens[None])
    taken: dict[Feature, Tensor] = {}
    for i, layer in enumerate(decoder_layers(target.layers)):
        if i in features:
            taken[i] = hidden
        rotated = target.config.rotary[i]
        attention = layer.self_attn
        q, k, v = attention.qkv(layer.input_layernorm(hidden), cos if rotated else None, sin if rotated else None)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=attention.scale, enable_gqa=k.shape[1] != q.shape[1]
        )
        hidden = layer.finish(hidden, mixed.transpose(1, 2).reshape(1, width, -1))
    taken[target.config.num_layers] = hidden
    if "final" in features:
        taken["final"] = target.norm(hidden)
    return torch.cat([taken[f] for f in features], dim=-1)[0]


def feature_stamp(
    fingerprint: str, features: Sequence[Feature], data: Mapping[str, str], max_length: int
) -> dict[str, Any]:
    """What a feature folder depends on: target, features, data sets by name, and the cut."""
    return {
        "format": "aquiline-features-1",
        "target": fingerprint,
        "features": [str(f) for f in dict.fromkeys((*features, "final"))],
        "data": dict(sorted(data.items())),
        "max_length": max_length,
    }


def conversation_key(source: int, index: int) -> str:
    """Name of a conversation's features in the folder."""
    return f"{source}.{index}"


@dataclass(eq=False)
class FeatureStore:
    """A folder of features that fills while training.

    Attributes:
        folder: where ``stamp.json`` and ``shard-*.safetensors`` lie.
        stamp: see `feature_stamp`; a folder with another stamp is refused.
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
        """What a stored row holds, in order; "final" is always in it."""
        return tuple("final" if f == "final" else int(f) for f in self.stamp["features"])

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
        """Writes what is pending, atomically; on a full disk it stops writing and says so."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if not self.pending:
            return
        name = hashlib.sha256(" ".join(sorted(self.pending)).encode()).hexdigest()[:16]
        path = self.folder / f"shard-{name}.safetensors"
        scratch = path.with_suffix(f".partial-{os.getpid()}")
        size = sum(t.nbytes for t in self.pending.values())
        try:
            if shutil.disk_usage(self.folder).free < 4 * size:
                raise OSError(f"less than {4 * size / 1e9:.1f} GB free")
            save_file({k: t.contiguous() for k, t in self.pending.items()}, scratch)
            os.replace(scratch, path)
        except (OSError, RuntimeError) as error:
            scratch.unlink(missing_ok=True)
            self.full = True
            self.pending.clear()
            print(f"feature folder {self.folder}: {error}; training goes on without writing to it")
            return
        self.written.update(dict.fromkeys(self.pending, path))
        self.pending.clear()


def open_features(folder: str | Path, stamp: dict[str, Any]) -> FeatureStore:
    """Opens or starts a feature folder.

    Raises:
        ValueError: if the folder was made for another target, data or features.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "stamp.json"
    if path.is_file():
        found = json.loads(path.read_text())
        if set(stamp["features"]) <= set(found.get("features", ())):
            stamp = stamp | {"features": found["features"]}  # an EAGLE-3 folder serves EAGLE-1
        different = sorted(k for k in stamp.keys() | found.keys() if stamp.get(k) != found.get(k))
        if different:
            raise ValueError(
                f"the features in {folder} were made with another {', '.join(different)}; "
                "name an empty folder, or delete this one"
            )
    else:
        path.write_text(json.dumps(stamp, indent=2) + "\n")
    store = FeatureStore(folder, stamp)
    for shard in sorted(folder.glob("shard-*.safetensors")):
        try:
            with safe_open(shard, framework="pt") as handle:
                store.written.update(dict.fromkeys(handle.keys(), shard))
        except SafetensorError as error:
            raise ValueError(f"{shard} is damaged ({error}); delete it") from error
    return store
