"""The papers' findings, reproduced small: equal data for every head, the ordering and its spread."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from aquiline.bench.environment import environment
from aquiline.bench.measure import Case, measure
from aquiline.bench.methods import Bed, Method, make_method, parse_method
from aquiline.bench.recorder import Node, Recorder, judged_nodes
from aquiline.bench.runner import encode_turns, open_bed, run_bench
from aquiline.bench.settings import BenchSettings
from aquiline.bench.tasks import load_questions
from aquiline.checkpoints.open import resolve_head
from aquiline.models.files import write_text
from aquiline.targets.target import eagle3_layers
from benchmarks.findings.comparisons import (
    COMPARISONS,
    HEADS,
    HELD_OUT,
    HeadSpec,
    comparable,
    compare,
    is_overall,
    render_findings,
)
from benchmarks.findings.positions import position_profile

logger = logging.getLogger("aquiline")

SCHEMA = 1

TrainHead = Callable[[HeadSpec, Mapping[str, Any], Path], None]
"""Trains a head: (which one, fields of `TrainSettings`, output folder); resumes what lies there, and
leaves the head in the folder's ``head`` and its measurements in ``metrics.jsonl``."""


@dataclass(frozen=True)
class AblationSettings:
    """A run of all ablations.

    Attributes:
        target: alias, folder, GGUF file or hub id.
        data: training sets made by `prepare`; all heads see the same positions of them.
        given: (name in `findings.HEADS`, its folder or the name of a shipped head): these heads are
            compared as they are, and nothing is trained.
        positions: positions that each head is trained on.
        seeds: each is one training of every head.
        training: further fields of `TrainSettings` for every head; they win over the heads' own.
        features: folder that keeps the target's features for all trainings; None computes them each time.
        questions: folders or files of questions; empty: the embedded set.
        tasks: tasks to measure on.
        per_task: questions of each; 0 measures on the training sets' held-out conversations alone,
            teacher-forced as the trainer does it: no speeds, and no dynamic trees.
        max_new_tokens: budget of an answer.
        batch_sizes: for the speedup by batch size.
        heads: names of the heads to train and measure; empty: all of `findings.HEADS`.
        output: folder; a run that was cut off there is resumed.
        dtype: of the weights; None: the fastest on this machine.
        device: where the target runs.
        threads: CPU threads; None: PyTorch's choice.
    """

    target: str = "smollm2"
    data: tuple[str, ...] = ()
    given: tuple[tuple[str, str], ...] = ()
    positions: int = 300_000
    seeds: tuple[int, ...] = (0, 1, 2)
    training: tuple[tuple[str, Any], ...] = ()
    features: str | None = None
    questions: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("mt_bench",)
    per_task: int = 10
    max_new_tokens: int = 128
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    heads: tuple[str, ...] = ()
    output: str = "ablations"
    dtype: str | None = None
    device: str = "cpu"
    threads: int | None = None

    def __post_init__(self) -> None:
        known = [spec.name for spec in HEADS]
        for name in (*self.heads, *(name for name, _ in self.given)):
            if name not in known:
                raise ValueError(f"unknown head {name!r}; there are: {', '.join(known)}")
        if not self.seeds:
            raise ValueError("seeds are empty; allowed: at least one integer")
        if self.per_task < 0:
            raise ValueError(f"per_task is {self.per_task}; allowed: ≥ 1, or 0 for held-out conversations alone")
        if self.positions < 1:
            raise ValueError(f"positions is {self.positions}; it must be at least 1")
        if not self.data and not self.given:
            raise ValueError(
                "no training data given; make a set with `aquiline prepare`, or give heads that are there already"
            )
        if self.given and (self.data or self.heads):
            raise ValueError("heads are given, so none is trained: leave the training sets and the heads to train out")
        for name, _ in self.given:
            if next(spec for spec in HEADS if spec.name == name).inputs:
                raise ValueError(f"head {name!r} is an ablation that no engine runs; it is trained, not given")
        if self.given and not self.per_task:
            raise ValueError("per_task is 0, and heads that are given have no held-out conversations; allowed: ≥ 1")


@dataclass(frozen=True, eq=False)
class AblationReport:
    """Finished ablations.

    Attributes:
        results: what ablations.json holds.
        markdown: the findings as tables.
        folder: where both lie.
    """

    results: dict[str, Any]
    markdown: str
    folder: Path


def run_ablations(
    settings: AblationSettings, train: TrainHead, bed: Bed | None = None, *, quiet: bool = False
) -> AblationReport:
    """Trains the missing heads, measures each, and compares them.

    Every step leaves its result in the output folder and is not done twice.

    Args:
        settings: the run.
        train: trains one head.
        bed: a target that is loaded already; None loads the one that the settings name.
        quiet: no progress bars.

    Raises:
        ValueError: bad settings, or what `run_bench` and `train` raise.
        WrongTokens: see `run_bench`.
    """
    bench = BenchSettings(
        target=settings.target, dtype=settings.dtype, device=settings.device, threads=settings.threads,
        max_new_tokens=settings.max_new_tokens, batch_sizes=settings.batch_sizes,
    )  # fmt: skip
    if settings.per_task:
        load_questions(settings.questions, settings.tasks, settings.per_task)  # before hours of training
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    folder = Path(settings.output)
    bed = bed or open_bed(bench)
    chosen = settings.heads or tuple(name for name, _ in settings.given)
    specs = [spec for spec in HEADS if not chosen or spec.name in chosen]
    runs: dict[str, list[dict[str, Any]]] = {spec.name: [] for spec in specs}
    for seed in _seeds(settings):
        for spec in specs:
            head = _given(settings, spec) or _trained(settings, spec, seed, folder, bed, train)
            runs[spec.name].append(_measured(settings, spec, seed, folder, bed, head, quiet))
    results = {
        "schema": SCHEMA,
        "settings": asdict(settings),
        "environment": environment(bed),
        "heads": {spec.name: _origin(settings, spec, bed.target.shape.num_layers) for spec in specs},
        "runs": runs,
        "comparisons": [compare(c, runs) for c in COMPARISONS if comparable(c, runs)],
        "positions": _positions(settings, folder, bed) if "eagle" in runs and settings.per_task else None,
    }
    markdown = render_findings(results)
    write_text(folder / "ablations.json", json.dumps(results, ensure_ascii=False, indent=1))
    write_text(folder / "ablations.md", markdown)
    return AblationReport(results, markdown, folder)


def _seeds(settings: AblationSettings) -> tuple[int, ...]:
    """Heads that are given have no seeds, and greedy answers none either."""
    return settings.seeds[:1] if settings.given else settings.seeds


def _origin(settings: AblationSettings, spec: HeadSpec, num_layers: int) -> dict[str, Any]:
    """Describes what differs in the head's training, or names the head that was given."""
    given = dict(settings.given).get(spec.name)
    return spec.training(num_layers) if given is None else {"given": given}


def _given(settings: AblationSettings, spec: HeadSpec) -> str | None:
    """The folder or name of a head that is not to be trained; a name holds on another machine too."""
    head = dict(settings.given).get(spec.name)
    if head is not None:
        resolve_head(head)
    return head


def _head_folder(folder: Path, spec: str, seed: int) -> Path:
    return folder / "heads" / f"{spec}-seed{seed}"


def _trained(settings: AblationSettings, spec: HeadSpec, seed: int, folder: Path, bed: Bed, train: TrainHead) -> Path:
    """The head's folder, trained unless it was; a mark says that the training came to its end."""
    output = _head_folder(folder, spec.name, seed)
    mark = output / "trained"
    if not mark.is_file():
        output.mkdir(parents=True, exist_ok=True)
        fields = {
            "data": settings.data, "total_positions": settings.positions, "seed": seed,
            "batch_positions": 2048, "warmup_positions": settings.positions // 10, "decay_share": 0.7,
            "validate_positions": 10 * settings.positions,
            **_kept(settings, spec, bed.target.shape.num_layers),
            **spec.training(bed.target.shape.num_layers), **dict(settings.training),
        }  # fmt: skip
        logger.info("training %s, seed %d", spec.name, seed)
        train(spec, fields, output)
        if not (output / "head").is_dir():
            raise ValueError(f"the training of {spec.name} left no head in {output / 'head'}")
        mark.write_text("")
    return output / "head"


def _kept(settings: AblationSettings, spec: HeadSpec, num_layers: int) -> dict[str, Any]:
    """One folder of features for all heads, but for those that read other layers."""
    if settings.features is None:
        return {}
    if "layers" in dict(spec.fields):
        return {"features": f"{settings.features}-{spec.name}"}
    return {"features": settings.features, "keep_layers": eagle3_layers(num_layers) if num_layers >= 7 else ()}


def _validated(output: Path) -> dict[str, dict[str, Any]]:
    """Reads the final teacher-forced measurements of each validation split from the trainer's log."""
    file = output / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    records = [json.loads(line) for line in lines]
    return {Path(r["validation"]).name: r for r in records if "validation" in r}


def _held_out_cells(spec: HeadSpec, validation: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Cells of the chain and of the fixed tree from the trainer's last validation, the first set's."""
    cells = []
    for method in spec.methods:
        field = {"chain": "tau_chain5", "static": "tau_tree"}.get(method.partition(":")[2])
        if field is None:
            continue
        for record in list(validation.values())[:1]:
            cell = {"method": method, "task": HELD_OUT, "batch": 1, "tau": {"value": record[field]}}
            if field == "tau_chain5":
                cell |= {"alpha": record["alpha"], "ece": record["calibration_error"]}
            cells.append(cell)
    return cells


def _measured(
    settings: AblationSettings, spec: HeadSpec, seed: int, folder: Path, bed: Bed, head: str | Path, quiet: bool
) -> dict[str, Any]:
    """τ, n-α and the rest of the head's methods, as cells over all tasks."""
    validation = _validated(_head_folder(folder, spec.name, seed))
    held_out = _held_out_cells(spec, validation)
    if not settings.per_task or spec.inputs:
        return {"seed": seed, "cells": held_out, "agreement": [], "validation": validation}
    first = seed == settings.seeds[0]
    chosen = BenchSettings(
        target=settings.target,
        methods=spec.methods,
        try_methods=(),
        questions=settings.questions,
        tasks=settings.tasks,
        per_task=settings.per_task,
        max_new_tokens=settings.max_new_tokens,
        batch_sizes=settings.batch_sizes if first and spec.name == "eagle3" else (1,),
        heads=((spec.kind, str(head)),),
        dtype=settings.dtype,
        device=settings.device,
        cost_curve=False,
        output=str(folder / "runs" / f"{spec.name}-seed{seed}"),
    )
    own = Bed(bed.target, bed.tokenizer, bed.end_ids, bed.path, bed.name, {spec.kind: str(head)})
    results = run_bench(chosen, own, quiet=quiet).results
    cells = [cell for cell in results["summary"] if cell["method"] != "plain" and is_overall(cell)]
    return {
        "seed": seed,
        "cells": [*cells, *held_out],
        "agreement": results["agreement"],
        "validation": validation,
    }


def _positions(settings: AblationSettings, folder: Path, bed: Bed) -> dict[str, Any]:
    """Acceptance by position in the static tree against acceptance by confidence, over all seeds."""
    file = folder / "positions.json"
    if not file.is_file():
        questions = load_questions(settings.questions, settings.tasks, settings.per_task)
        nodes: list[Node] = []
        for seed in _seeds(settings):
            head = dict(settings.given).get("eagle") or _head_folder(folder, "eagle", seed) / "head"
            own = Bed(bed.target, bed.tokenizer, bed.end_ids, bed.path, bed.name, {"eagle": str(head)})
            drafter = make_method(parse_method("eagle:static"), own).drafter
            assert drafter is not None
            for question in questions:
                prompt = tuple(encode_turns(bed, question.turns[:1], ()))
                if len(prompt) + settings.max_new_tokens > bed.target.shape.max_positions:
                    continue
                watched = Recorder(drafter)
                case = Case(question.task, (question.id,), 0, (prompt,), 0.0, settings.max_new_tokens)
                measure(own, Method("eagle:static", watched, ""), case)
                nodes += judged_nodes(watched.steps)
        write_text(file, json.dumps(position_profile(nodes)))
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
