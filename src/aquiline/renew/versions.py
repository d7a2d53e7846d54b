"""Versions of a served head: numbered folders, and a pointer to the one that drafts.

    FOLDER/versions/0003/   config.json, model.safetensors, README.md (the card), version.json
    FOLDER/current          "0003"
    FOLDER/events.jsonl     swaps, rejections and rollbacks
    FOLDER/training/        the candidate, while there is one

A version appears with its config.json, which is written last, and the pointer moves by one rename: a kill at any
moment leaves a head that can be served.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from aquiline.models.files import filling, read_json, write_text


@dataclass(frozen=True)
class Version:
    """A version of the head.

    Attributes:
        folder: a head's folder.
        parent: the version that it was trained from, or None for the first.
        created: seconds since the epoch.
        verdict: the gate's figures, see `aquiline.renew.gate.Verdict`; empty for the first.
    """

    number: int
    folder: Path
    parent: int | None
    created: float
    verdict: Mapping[str, Any]


def versions(folder: Path) -> list[Version]:
    """All whole versions, oldest first; other folders beside them are left alone.

    Raises:
        ValueError: if a version.json is damaged.
    """
    places = sorted(config.parent for config in (folder / "versions").glob("*/config.json"))
    return [_version(place) for place in places if re.fullmatch("[0-9]{4,9}", place.name)]


def _version(place: Path) -> Version:
    facts = read_json(place / "version.json", "remove the version's folder")
    parent, created, verdict = (facts.get(name) for name in ("parent", "created", "verdict"))
    if not (isinstance(parent, int | None) and _is_time(created) and isinstance(verdict, dict)):
        raise ValueError(f"{place / 'version.json'} holds no parent, time and verdict; remove the version's folder")
    return Version(int(place.name), place, parent, created, verdict)


def _is_time(value: object) -> TypeGuard[float]:
    """Whether a file's value can be seconds since the epoch."""
    return isinstance(value, int | float) and 0 <= value < 1e11


def add_version(folder: Path, head: Path, parent: int | None, verdict: Mapping[str, Any] | None = None) -> Version:
    """Copies a head's folder into a new version, which is not served yet."""
    number = 1 + max((version.number for version in versions(folder)), default=-1)
    place, created = folder / "versions" / f"{number:04d}", time.time()
    with filling(place) as scratch:
        for file in head.iterdir():
            if file.is_file():
                shutil.copyfile(file, scratch / file.name)
        facts = {"parent": parent, "created": created, "verdict": dict(verdict or {})}
        (scratch / "version.json").write_text(json.dumps(facts), encoding="utf-8")
    return Version(number, place, parent, created, verdict or {})


def current(folder: Path) -> Version | None:
    """The served version; the newest one where the pointer is missing or names none; None if there is none."""
    there = {version.number: version for version in versions(folder)}
    try:
        number = int((folder / "current").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        number = -1
    return there.get(number) or there.get(max(there, default=-1))


def serve_version(folder: Path, number: int, event: str, **facts: Any) -> None:
    """Points to a version; a running server swaps it in within seconds.

    Raises:
        ValueError: if there is no such version.
    """
    numbers = [version.number for version in versions(folder)]
    if number not in numbers:
        raise ValueError(f"version is {number}; allowed: {', '.join(map(str, numbers)) or 'none yet'}")
    write_text(folder / "current", f"{number:04d}\n")
    record(folder, event, version=number, **facts)


def roll_back(folder: Path, reason: str, number: int | None = None) -> int:
    """Serves an earlier version again.

    Args:
        reason: for the record of events.
        number: the version; None: the parent of the served one.

    Returns:
        Its number.

    Raises:
        ValueError: if the first version is served already, or `number` does not exist.
    """
    served = current(folder)
    if number is None:
        if served is None or served.parent is None:
            raise ValueError(f"{folder} serves the first version of its head; there is none to go back to")
        number = served.parent
    serve_version(folder, number, "rollback", reason=reason, given_up=None if served is None else served.number)
    return number


def conclude(folder: Path) -> None:
    """Serves the candidate or drops it, as the gate decided; a second call after a kill adds nothing that is served."""
    work = folder / "training"
    verdict = read_json(work / "verdict.json", "remove the folder")
    base, served = verdict.pop("base"), current(folder)
    if served is None or served.number != base:
        record(folder, "dropped", reason=f"it was trained from version {base}, which is no longer served")
    elif verdict["better"]:
        made = add_version(folder, work / "candidate", base, verdict)
        serve_version(folder, made.number, "swap", reason=verdict["reason"])
    else:
        record(folder, "rejected", reason=verdict["reason"])
    end_candidate(folder)


def end_candidate(folder: Path) -> None:
    """Removes the candidate and keeps its log; the next one waits for new conversations."""
    work = folder / "training"
    if (work / "log.txt").is_file():
        os.replace(work / "log.txt", folder / "training-log.txt")
    write_text(folder / "state.json", f'{{"until": {time.time()}}}\n')
    shutil.rmtree(work, ignore_errors=True)


def last_candidate(folder: Path) -> float:
    """When the last candidate ended, in seconds since the epoch; 0 if there was none."""
    mark = folder / "state.json"
    until = read_json(mark, "remove it").get("until") if mark.is_file() else 0.0
    if not _is_time(until):
        raise ValueError(f"{mark} holds no time in seconds; remove it")
    return until


def record(folder: Path, event: str, **facts: Any) -> None:
    """Appends an event to the record."""
    line = json.dumps({"time": time.time(), "event": event, **facts})
    with (folder / "events.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(f"{line}\n")


def events(folder: Path) -> list[dict[str, Any]]:
    """The recorded events, oldest first; damaged lines, such as one that a kill cut, are left out."""
    file, found = folder / "events.jsonl", []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else ():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str) and _is_time(event.get("time")):
            found.append(event)
    return found
