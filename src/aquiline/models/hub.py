"""Fetches models from the hub, or from a complete copy in its local cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_hub_id(name: str) -> bool:
    """Returns True for a name of the form organisation/name."""
    return bool(_HUB_ID.fullmatch(name)) and not name.endswith(".gguf")


def fetch(name: str, patterns: Sequence[str], check: Callable[[Path], object], remedy: str = "") -> Path:
    """Returns the folder of a hub model; a complete cached copy is taken without asking the network.

    Args:
        patterns: files to fetch, as globs.
        check: raises ValueError for a folder that is not complete.
        remedy: further advice if the download fails, for the message.

    Raises:
        RuntimeError: if the download fails.
        ValueError: if the downloaded folder does not pass `check`.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    try:
        cached = Path(snapshot_download(name, allow_patterns=list(patterns), local_files_only=True))
        check(cached)
        return cached
    except (OSError, ValueError, EntryNotFoundError):
        pass  # Not cached, or only a part of it.
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (OSError, ValueError, EntryNotFoundError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RuntimeError(
            f"could not get {name!r}: there is no such folder here, no complete copy in the hub cache, and the hub "
            f"said: {reason}; check the spelling and the network, log in if the model is gated{remedy}"
        ) from error
    check(folder)
    return folder
