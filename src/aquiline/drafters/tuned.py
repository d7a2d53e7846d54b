"""The file that tuning writes and loading takes: what drafts fastest on someone's prompts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aquiline.drafters.trees import Chain, DynamicTree, StaticTree, TreePolicy

FORMAT = "aquiline-tuned"
VERSION = 1
_KINDS: dict[str, type[Any]] = {"chain": Chain, "static": StaticTree, "dynamic": DynamicTree}


@dataclass(frozen=True)
class TunedChoice:
    """What was fastest.

    Attributes:
        method: "plain", or what drafts, in words.
        draft: what `load` takes as its draft: "auto", a head's folder or name, "prompt-lookup", or
            None for plain decoding.
        tree: the shape of the drafts; None for the draft's own default, or for plain decoding.
        target_fingerprint: of the target that it was measured on, or None.
    """

    method: str
    draft: str | None
    tree: TreePolicy | None
    target_fingerprint: str | None = None


def tree_record(policy: TreePolicy) -> dict[str, Any]:
    """A policy as JSON-able values."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(policy, cls))
    return {"kind": kind} | dataclasses.asdict(policy)


def tree_from_record(record: Mapping[str, Any]) -> TreePolicy:
    """The inverse of `tree_record`.

    Raises:
        ValueError: for an unknown kind or settings that make no tree.
    """
    kind = record.get("kind")
    if kind not in _KINDS:
        raise ValueError(f"tree kind {kind!r} is not known; allowed: {', '.join(_KINDS)}")
    settings = {name: value for name, value in record.items() if name != "kind"}
    if kind == "static":
        settings["paths"] = tuple(tuple(path) for path in settings.get("paths", ()))
    try:
        policy: TreePolicy = _KINDS[kind](**settings)
    except TypeError as error:
        raise ValueError(f"{kind} tree with settings {sorted(settings)}: {error}") from error
    return policy


def write_tuned(path: Path, choice: TunedChoice, evidence: Mapping[str, Any]) -> None:
    """Writes the file, whole or not at all; `evidence` is kept for the reader's judgement."""
    record = {
        "format": FORMAT,
        "version": VERSION,
        "method": choice.method,
        "draft": choice.draft,
        "tree": None if choice.tree is None else tree_record(choice.tree),
        "target_fingerprint": choice.target_fingerprint,
        "evidence": dict(evidence),
    }
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def read_tuned(path: str | Path) -> TunedChoice:
    """Reads the file.

    Raises:
        ValueError: it is missing, no tuned file, of a later version, or describes no tree.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{file} is not a file; give one that `aquiline tune` wrote, or a tree")
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}); write it again with `aquiline tune`") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{file} was not written by `aquiline tune` (its format is not {FORMAT!r})")
    if record.get("version") != VERSION:
        raise ValueError(f"{file} is of version {record.get('version')!r}; this release reads {VERSION}: tune again")
    try:
        tree = None if record["tree"] is None else tree_from_record(record["tree"])
        return TunedChoice(record["method"], record["draft"], tree, record.get("target_fingerprint"))
    except (KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{file} does not describe a choice ({error}); write it again with `aquiline tune`") from error
