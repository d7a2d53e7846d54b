"""Writes and reads the file of `aquiline tune`: the fastest draft and tree on the user's prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aquiline.drafters.trees import TREE_FORMS, BareTree, TreePolicy, parse_tree, tree_text
from aquiline.models.files import read_json, write_text

FORMAT = "aquiline-tuned"
VERSION = 2


@dataclass(frozen=True)
class TunedChoice:
    """The fastest draft and tree of a tuning run.

    Attributes:
        method: "plain", or the draft's display name.
        draft: draft for `load`: "auto", a head's folder or name, "prompt-lookup", or None for plain decoding.
        tree: the shape of the drafts; None for the draft's own default, or for plain decoding.
        target_fingerprint: of the target that it was measured on, or None.
    """

    method: str
    draft: str | None
    tree: TreePolicy | BareTree | None
    target_fingerprint: str | None = None


def write_tuned(path: Path, choice: TunedChoice, evidence: Mapping[str, Any]) -> None:
    """Writes the file, whole or not at all, with the measurements as `evidence`."""
    record = {
        "format": FORMAT,
        "version": VERSION,
        "method": choice.method,
        "draft": choice.draft,
        "tree": None if choice.tree is None else tree_text(choice.tree),
        "target_fingerprint": choice.target_fingerprint,
        "evidence": dict(evidence),
    }
    write_text(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def read_tuned(path: str | Path) -> TunedChoice:
    """Reads the file.

    Raises:
        ValueError: it is missing, not a tuned file, of another version, or its tree cannot be read.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(
            f"{str(path)!r} is neither a tree nor a file; allowed: {TREE_FORMS}, or a file that `aquiline tune` wrote"
        )
    record = read_json(file, "write it again with `aquiline tune`")
    if record.get("format") != FORMAT:
        raise ValueError(f"{file} was not written by `aquiline tune` (its format is not {FORMAT!r})")
    if record.get("version") != VERSION:
        raise ValueError(f"{file} is of version {record.get('version')!r}; this release reads {VERSION}: tune again")
    try:
        tree = None if record["tree"] is None else parse_tree(record["tree"])
        return TunedChoice(record["method"], record["draft"], tree, record.get("target_fingerprint"))
    except (KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{file} does not describe a choice ({error}); write it again with `aquiline tune`") from error
