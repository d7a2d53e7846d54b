"""Measures one generation of a method: its tokens and their times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from aquiline.bench.hf_generate import run_hf
from aquiline.bench.methods import Bed, Method
from aquiline.bench.recorder import Recorder, calibration_bins, judged_nodes
from aquiline.bench.records import Record
from aquiline.engine.generate import stream_requests
from aquiline.engine.request import Engine, GenerationOutput, Request
from aquiline.sampling import SamplingParams
from aquiline.stats import GenerationStats


@dataclass(frozen=True)
class Case:
    """Prompts and conditions, the same for every method.

    Attributes:
        questions: ids of the questions, one for each row.
        turn: index of the turn, from 0.
        prompts: token ids of each row.
    """

    task: str
    questions: tuple[str, ...]
    turn: int
    prompts: tuple[tuple[int, ...], ...]
    temperature: float
    max_new_tokens: int
    seed: int = 0

    @property
    def key(self) -> tuple[str, str, int, float, int]:
        """Equals `Record.case` of its records."""
        return self.task, "+".join(self.questions), self.turn, self.temperature, len(self.prompts)


def measure(bed: Bed, method: Method, case: Case, repeat: int = 0) -> Record:
    """Runs one method on one case."""
    before = _reset_peak(bed)
    if method.hf_model is not None:
        return _measure_hf(bed, method, case, repeat, before)
    drafter = None if method.drafter is None else Recorder(method.drafter)
    # Without a tokenizer: tokens are timed, as with `generate` of transformers.
    engine = Engine(bed.target, drafter, None, bed.end_ids, max_rows=len(case.prompts))
    params = SamplingParams(max_new_tokens=case.max_new_tokens, temperature=case.temperature, seed=case.seed)
    times: list[list[tuple[float, int]]] = [[] for _ in case.prompts]
    outputs: dict[int, GenerationOutput] = {}
    start = time.perf_counter()
    for event in stream_requests(engine, [Request(list(prompt), params) for prompt in case.prompts]):
        times[event.index].append((time.perf_counter() - start, len(event.token_ids)))
        if event.output is not None:
            if event.output.error is not None:
                raise event.output.error
            outputs[event.index] = event.output
    seconds = max(row[-1][0] for row in times)
    memory = _peak(bed, before)
    stats = _summed([outputs[i].stats for i in sorted(outputs)])
    return Record(
        **_conditions(method, case, repeat),
        outputs=[outputs[i].token_ids for i in sorted(outputs)],
        finish_reasons=[outputs[i].finish_reason for i in sorted(outputs)],
        seconds=seconds,
        first_token_seconds=[row[0][0] for row in times],
        gaps=[[(b[0] - a[0], b[1]) for a, b in pairwise(row)] for row in times],
        phases=stats.seconds,
        steps=stats.steps,
        nodes=stats.nodes,
        accepted=stats.accepted,
        offered_at=stats.offered_at,
        accepted_at=stats.accepted_at,
        calibration=[] if drafter is None else calibration_bins(judged_nodes(drafter.steps)),
        memory=memory,
    )


def _conditions(method: Method, case: Case, repeat: int) -> dict[str, Any]:
    """The fields of a record that are known before its run."""
    return {
        "method": method.label, "task": case.task, "questions": list(case.questions), "turn": case.turn,
        "temperature": case.temperature, "batch": len(case.prompts), "repeat": repeat,
        "prompt_tokens": [len(prompt) for prompt in case.prompts],
    }  # fmt: skip


def _summed(parts: Sequence[GenerationStats]) -> GenerationStats:
    """Adds the counters of all rows; a phase takes the seconds of its longest row, since rows share them."""
    total = GenerationStats()
    for part in parts:
        longest = {p: max(s, total.seconds.get(p, 0.0)) for p, s in part.seconds.items()}
        total.add(replace(part, seconds={}))
        total.seconds |= longest
    return total


def _measure_hf(bed: Bed, method: Method, case: Case, repeat: int, before: int | None) -> Record:
    run = run_hf(
        method.hf_model,
        case.prompts,
        max_new_tokens=case.max_new_tokens,
        temperature=case.temperature,
        seed=case.seed,
        end_ids=bed.end_ids,
    )
    steps = [b - a for a, b in pairwise(run.token_seconds)]
    return Record(
        **_conditions(method, case, repeat),
        outputs=run.outputs,
        finish_reasons=["eos" if row and row[-1] in bed.end_ids else "length" for row in run.outputs],
        seconds=run.seconds,
        first_token_seconds=[run.token_seconds[0]] * len(run.outputs),
        gaps=[[(s, 1) for s in steps[: len(row) - 1]] for row in run.outputs],
        memory=_peak(bed, before),
    )


def _reset_peak(bed: Bed) -> int | None:
    """Starts a new peak of memory; returns the bytes in use now, or None where the system does not report them."""
    if bed.target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bed.target.device)
        return torch.cuda.memory_allocated(bed.target.device)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _resident("VmRSS")
    except OSError:
        return None


def _peak(bed: Bed, before: int | None) -> dict[str, int]:
    if before is None:
        return {}
    if bed.target.device.type == "cuda":
        return {"before": before, "peak": torch.cuda.max_memory_allocated(bed.target.device)}
    return {"before": before, "peak": max(before, _resident("VmHWM"))}


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
