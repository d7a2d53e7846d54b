"""Results in pieces: an interrupted comparison resumes.

Every series of results (an engine with drafts, an engine without, our own chains) is a file of JSON lines under
`interop/.work` or INTEROP_WORK. One line, a piece, holds some prompts in order and what came out of them. The file's
name says all that the results depend on, so that another head, version or setting begins another file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).parent
WORK = Path(os.environ.get("INTEROP_WORK") or HERE / ".work")

Piece = dict[str, Any]
"""prompts (token ids), outputs (of each prompt), and where there were drafts: drafts, accepted, counters; versions."""
Run = Callable[[list[list[int]], TextIO], None]
"""Makes the pieces of some prompts and writes them to a file, by `add` or as an engine's script does."""


def digest(*parts: object) -> str:
    """Eight digits over files, folders (all .py, .json and .safetensors files in them) and texts."""
    found = hashlib.sha256()
    for part in parts:
        files = [part] if isinstance(part, Path) else []
        if isinstance(part, Path) and part.is_dir():
            files = [file for file in sorted(part.rglob("*")) if file.suffix in (".py", ".json", ".safetensors")]
        found.update(str(part).encode() if not files else b"".join(file.read_bytes() for file in files))
    return found.hexdigest()[:8]


def installed_version(python: str, package: str) -> str:
    """The version of a package in another environment."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def collect(name: str, prompts: Sequence[list[int]], run: Run, label: str) -> Piece:
    """Returns all results of a series: reads those in the file, and calls `run` for the other prompts.

    Args:
        name: of the file; names or digests all that the results depend on.
        prompts: token ids; results of other prompts are replaced.
        run: makes the missing pieces.
        label: name of the series in progress lines.

    Returns:
        One piece with everything.
    """
    path = WORK / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            # An engine inherits the lock, so that it holds for one that has lost its parent, too.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"{label}: another run is writing {path}; wait for it, or end it") from None
        pieces = _leading(path, prompts)
        there = sum(len(piece["prompts"]) for piece in pieces)
        print(f"{label}: {there} of {len(prompts)} prompts are there", file=sys.stderr, flush=True)
        if there < len(prompts):
            file.truncate(0)
            file.writelines(json.dumps(piece) + "\n" for piece in pieces)
            file.flush()
            run(list(prompts[there:]), file)
            pieces = _leading(path, prompts)
    total = _merged(pieces)
    if len(total["outputs"]) != len(prompts):
        raise SystemExit(f"{label}: {len(total['outputs'])} of {len(prompts)} prompts came back")
    return total


def add(file: TextIO, piece: Piece) -> None:
    """Writes a piece and says so."""
    file.write(json.dumps(piece) + "\n")
    file.flush()
    counts = f"; {piece['drafts']} chains, accepted {piece['accepted']}" if "drafts" in piece else ""
    print(f"  {len(piece['outputs'])} more{counts}", file=sys.stderr, flush=True)


def engine(python: str, script: str, job: dict[str, Any], *, environment: dict[str, str] | None = None) -> Run:
    """Runs a script in an engine's environment, which gets a job and the number of the open file.

    Args:
        python: its interpreter.
        script: beside this file; `script JOB.json FILE_NUMBER`.
        job: settings; the prompts are added.
        environment: variables beside ours.
    """

    def run(prompts: list[list[int]], file: TextIO) -> None:
        path = Path(file.name)
        given, log = path.with_suffix(".job.json"), path.with_suffix(".log")
        given.write_text(json.dumps({**job, "prompts": prompts}))
        command = [python, str(HERE / script), str(given), str(file.fileno())]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engine ends with us
        with log.open("w") as stream:
            process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                pass_fds=[file.fileno()],
                env={**os.environ, **(environment or {})},
            )
            try:
                _watch(process, path)
            finally:
                process.terminate()
                process.wait()
        if process.returncode:
            said = log.read_text(errors="replace")[-6000:]
            raise SystemExit(f"{script} ended with {process.returncode}:\n{said}")

    return run


def _watch(process: subprocess.Popen[bytes], path: Path) -> None:
    """Waits for an engine and tells of each piece that it writes."""
    begin, before = time.monotonic(), path.read_text().count("\n")
    while process.poll() is None:
        time.sleep(1)
        now = path.read_text().count("\n")
        if now > before:
            print(f"  {now} pieces, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
            before = now


def _leading(path: Path, prompts: Sequence[list[int]]) -> list[Piece]:
    """The first pieces of a file, as far as they are whole and belong to these prompts."""
    pieces: list[Piece] = []
    at = 0
    for line in path.read_text().splitlines():
        try:
            piece = json.loads(line)
        except ValueError:  # the run ended while it was written
            break
        count = len(piece["prompts"])
        if piece["prompts"] != prompts[at : at + count]:
            break
        pieces.append(piece)
        at += count
    return pieces


def _merged(pieces: Sequence[Piece]) -> Piece:
    total: Piece = {"outputs": [output for piece in pieces for output in piece["outputs"]]}
    if pieces and "versions" in pieces[-1]:
        total["versions"] = pieces[-1]["versions"]
    drafted = [piece for piece in pieces if "drafts" in piece]
    if drafted:
        total["drafts"] = sum(piece["drafts"] for piece in drafted)
        total["accepted"] = [sum(counts) for counts in zip(*(piece["accepted"] for piece in drafted), strict=True)]
    if drafted and "counters" in drafted[0]:
        total["counters"] = {name: sum(piece["counters"][name] for piece in drafted) for name in drafted[0]["counters"]}
    return total
