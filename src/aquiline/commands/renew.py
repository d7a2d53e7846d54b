"""aquiline renew: shows the versions of a renewed head, or goes back to an earlier one."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("folder", help="folder of `aquiline serve --renew`")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--status", action="store_true", help="show versions, events and the store (the default)")
    action.add_argument(
        "--rollback",
        nargs="?",
        type=int,
        default=False,
        const=None,
        metavar="VERSION",
        help="serve the version before the present one, or this one; a running server swaps within seconds (≥ 0)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from aquiline.models.files import user_path
    from aquiline.renew.settings import read_settings
    from aquiline.renew.versions import roll_back

    folder = user_path(arguments.folder)
    read_settings(folder)
    if arguments.rollback is not False:
        number = roll_back(folder, "asked for", arguments.rollback)
        print(json.dumps({"version": number}) if arguments.json else f"version {number} is served")
        return 0
    found = _status(folder)
    print(json.dumps(found, indent=2) if arguments.json else _shown(found))
    return 0


def _status(folder: Path) -> dict[str, Any]:
    from aquiline.renew.settings import LEAST_TOKENS
    from aquiline.renew.store import answer_tokens, read_store, segments
    from aquiline.renew.versions import current, events, last_candidate, versions

    served, conversations = current(folder), folder / "conversations"
    kept, files = read_store(conversations), segments(conversations)
    return {
        "current": None if served is None else served.number,
        "versions": [
            {"number": v.number, "parent": v.parent, "created": v.created, "verdict": dict(v.verdict)}
            for v in versions(folder)
        ],
        "store": {
            "conversations": len(kept),
            "tokens": sum(len(each.tokens) for each in kept),
            "bytes": sum(file.stat().st_size for file in files),
            "new_answer_tokens": answer_tokens(kept, last_candidate(folder)),
            "needed": LEAST_TOKENS,
        },
        "training": (folder / "training").is_dir(),
        "events": events(folder)[-20:],
    }


def _shown(found: dict[str, Any]) -> str:
    store = found["store"]
    lines = [
        f"store: {store['conversations']:,} conversations, {store['tokens']:,} tokens, {store['bytes'] / 1e6:.1f} MB",
        f"new answers: {store['new_answer_tokens']:,} tokens of the {store['needed']:,} that begin a training",
        f"candidate in training: {'yes' if found['training'] else 'no'}",
        "versions:",
    ]
    for version in found["versions"]:
        mark = "→" if version["number"] == found["current"] else " "
        reason = version["verdict"].get("reason", "the head that was served first")
        lines.append(f"{mark} {version['number']:4d}  {_date(version['created'])}  {reason}")
    lines.append("events:")
    for event in found["events"]:
        facts = [f"{name.replace('_', ' ')} {event[name]}" for name in ("version", "given_up") if name in event]
        facts += [str(event[name]) for name in ("reason", "error") if name in event]
        lines.append(f"  {_date(event['time'])}  {event['event']}: {'; '.join(facts)}")
    return "\n".join(lines)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
