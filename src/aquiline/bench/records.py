"""Keeps raw measurements, one record per method, question and turn, in a log that survives a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aquiline.models.files import append_whole


@dataclass(frozen=True)
class Record:
    """One generation of one method: a turn of one question, or of a batch of questions.

    Attributes:
        method: label of the method.
        task: task of the questions.
        questions: ids of the questions, one per row of the batch.
        turn: index of the turn, from 0.
        temperature: sampling temperature.
        batch: rows decoded together.
        repeat: 0, or 1 for the second run of plain decoding.
        prompt_tokens: per row, length of the prompt.
        outputs: per row, emitted token ids.
        finish_reasons: per row, see `GenerationOutput`.
        seconds: from the call to the last token, prefill included.
        first_token_seconds: per row, from the call to its first token.
        gaps: per row, [seconds since the row's previous tokens, tokens emitted] for each later step.
        phases: phase → seconds; if batch > 1, of the row that spent the longest in the phase.
        steps: target forwards that verified a tree, summed over rows.
        nodes: drafted nodes that the target computed.
        accepted: accepted drafts.
        offered_at: steps whose tree had a node at depth d + 1 below an accepted one.
        accepted_at: steps that accepted a node at depth d + 1.
        calibration: per bin of the draft's confidence: [judged nodes, sum of confidences, accepted];
            empty for methods without confidences.
        memory: bytes of resident or device memory, before and at the peak of the run; empty if the
            system does not report them.
    """

    method: str
    task: str
    questions: list[str]
    turn: int
    temperature: float
    batch: int
    repeat: int
    prompt_tokens: list[int]
    outputs: list[list[int]]
    finish_reasons: list[str]
    seconds: float
    first_token_seconds: list[float]
    gaps: list[list[tuple[float, int]]]
    phases: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    nodes: int = 0
    accepted: int = 0
    offered_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    calibration: list[tuple[int, float, int]] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def case(self) -> tuple[str, str, int, float, int]:
        """Prompts and conditions, on which methods are compared."""
        return self.task, "+".join(self.questions), self.turn, self.temperature, self.batch

    @property
    def tokens(self) -> int:
        """Emitted tokens of all rows."""
        return sum(len(output) for output in self.outputs)


def record_json(record: Record) -> dict[str, Any]:
    """Converts a record to JSON-serialisable values, with seconds rounded to microseconds."""
    values = asdict(record)
    values["seconds"] = round(record.seconds, 6)
    values["first_token_seconds"] = [round(s, 6) for s in record.first_token_seconds]
    values["gaps"] = [[[round(s, 6), n] for s, n in row] for row in record.gaps]
    values["phases"] = {phase: round(s, 6) for phase, s in record.phases.items()}
    values["calibration"] = [[n, round(s, 6), a] for n, s, a in record.calibration]
    return values


def record_from_json(values: Mapping[str, Any]) -> Record:
    """The inverse of `record_json`."""
    fixed = dict(values)
    fixed["gaps"] = [[(s, n) for s, n in row] for row in values["gaps"]]
    fixed["calibration"] = [(n, s, a) for n, s, a in values["calibration"]]
    return Record(**fixed)


class RunLog:
    """JSON lines, each written in one piece, for one set of settings.

    The first line holds the settings; opening a log with different settings is an error. A last line
    without a newline comes from a killed run and is dropped.

    Args:
        path: the file; created if missing.
        settings: JSON-serialisable settings that determine the results.

    Raises:
        ValueError: if the log has different settings (named), or a line that is not a record.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        whole = self._read(settings) if path.exists() else 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._file, whole)
        if whole == 0:
            self._write({"settings": dict(settings)})

    def _read(self, settings: Mapping[str, Any]) -> int:
        whole = 0
        with self.path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    entry = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{self.path}, line {number} is not JSON; remove it or the file") from error
                if number == 1:
                    self._check(entry.get("settings", {}), json.loads(json.dumps(settings)))
                else:
                    self.entries.append(entry)
                whole += len(line)
        return whole

    def _check(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        changed = [f"{k}: {old.get(k)!r} → {new.get(k)!r}" for k in {**old, **new} if old.get(k) != new.get(k)]
        if changed:
            raise ValueError(
                f"{self.path} holds a run with different settings ({'; '.join(changed)}); "
                "choose another output folder, or use its settings to resume it"
            )

    def append(self, kind: str, values: Mapping[str, Any]) -> None:
        """Adds an entry; it is on disk when this returns."""
        entry = {"kind": kind, **values}
        self._write(entry)
        self.entries.append(entry)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Returns the entries of a kind, without their `kind` field."""
        return [{k: v for k, v in e.items() if k != "kind"} for e in self.entries if e.get("kind") == kind]

    def close(self) -> None:
        os.close(self._file)

    def _write(self, entry: Mapping[str, Any]) -> None:
        append_whole(self._file, self.path, json.dumps(entry, ensure_ascii=False).encode() + b"\n")


def pooled_gaps(records: Sequence[Record]) -> list[float]:
    """Inter-token latencies: a step of s seconds that emitted k tokens counts as k latencies of s / k."""
    return [s / n for record in records for row in record.gaps for s, n in row for _ in range(n)]
