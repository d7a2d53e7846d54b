"""From what a user names to a folder with a draft head, and the heads that ship."""

from __future__ import annotations

import json
import re
from pathlib import Path

from aquiline.models.resolve import target_fingerprint

SHIPPED = Path(__file__).parent.parent / "heads"
"""Draft heads that come with the package."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.bin", "*.pt"]


def resolve_head(name: str | Path) -> Path:
    """Returns the folder (or GGUF file) of the head that `name` means.

    Tried in this order: a folder, a training's output folder (its ``head``), a GGUF file, the
    name of a shipped head, a hub id (from a filled cache also offline).

    Raises:
        ValueError: there is nothing of that name.
        RuntimeError: the download failed.
    """
    path = Path(name).expanduser()
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
    if _HUB_ID.fullmatch(text) and not text.endswith(".gguf"):
        return _from_hub(text)
    shipped = ", ".join(path.name for path in shipped_heads()) or "none for now"
    raise ValueError(
        f"unknown draft head {text!r}: no file or folder of that name; allowed: a head's folder, a GGUF file, a hub id "
        f"(organisation/name), or a shipped head ({shipped}); what drafts may also be auto, none, prompt-lookup, "
        "lookahead"
    )


def shipped_heads() -> list[Path]:
    """The folders of the shipped heads; EAGLE-3 first, which draft best."""
    return sorted(
        (config.parent for config in SHIPPED.glob("*/config.json")), key=lambda p: ("eagle3" not in p.name, p)
    )


def shipped_head(target: Path | None) -> Path | None:
    """The first shipped head that was trained for exactly the target in a folder, or None."""
    heads = shipped_heads()
    if target is None or not heads:
        return None
    fingerprint = target_fingerprint(target)
    for head in heads:
        config = json.loads((head / "config.json").read_text(encoding="utf-8"))
        if config.get("aquiline_target_fingerprint") == fingerprint:
            return head
    return None


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    try:
        cached = Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
        if (cached / "config.json").is_file():
            return cached
    except (OSError, ValueError, EntryNotFoundError):
        pass  # Not in the cache.
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, EntryNotFoundError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RuntimeError(
            f"could not get the head {name!r}: there is no such folder here, no copy in the hub cache, and the hub "
            f"said: {reason}; check the spelling and the network"
        ) from error
