"""Writes the clients' lines into a results file, and keeps those of clients that did not run: record.py FILE < LINES"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(file: str) -> None:
    """Merges by the clients' names."""
    path = Path(file)
    found = {entry["client"]: entry for entry in json.loads(path.read_text())} if path.exists() else {}
    found |= {entry["client"]: entry for entry in map(json.loads, sys.stdin)}
    path.write_text(json.dumps(list(found.values()), indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
