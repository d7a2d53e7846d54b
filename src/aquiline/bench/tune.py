"""Finds the method and tree with the highest tokens/s on a user's prompts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from aquiline.bench.environment import environment
from aquiline.bench.measure import Case, measure
from aquiline.bench.methods import Bed, Method
from aquiline.bench.profile import Costs, Prediction, Profile, make_profile, predict
from aquiline.bench.recorder import Recorder
from aquiline.bench.records import Record
from aquiline.bench.runner import encode_turns, open_bed
from aquiline.bench.settings import BenchSettings, TuneSettings
from aquiline.bench.tasks import load_questions
from aquiline.bench.tune_sources import Candidate, Source, find_sources
from aquiline.drafters.trees import Chain, DynamicTree, tree_text
from aquiline.drafters.tuned import TunedChoice, write_tuned
from aquiline.models.files import check_output
from aquiline.targets.cost import cost_curve

logger = logging.getLogger("aquiline")

PROBE_CHAIN = 6
LARGEST = DynamicTree(num_nodes=48, depth=6, top_k=6)
"""The tree whose acceptance is recorded; all proposals are parts of it."""


@dataclass(frozen=True, eq=False)
class TuneReport:
    """The winner as written to `path`, and each contestant's predicted and measured speed, JSON-able and as a table."""

    choice: TunedChoice
    path: Path
    rows: list[dict[str, Any]]
    text: str


def tune(settings: TuneSettings, bed: Bed | None = None, sources: Sequence[Source] | None = None) -> TuneReport:
    """Proposes trees from a cost curve and an acceptance profile, confirms them, writes the winner.

    Half of the prompts propose: the target's forward is timed by its number of tokens, and a
    large tree is verified to learn which smaller ones would have been accepted. The other half
    confirms: proposals, load()'s default and plain decoding take turns on them, and the highest
    tokens/s wins. So plain decoding wins where speculation does not pay.

    Args:
        settings: the run.
        bed: a loaded target; None loads the one that the settings name.
        sources: drafter families; None: the target's EAGLE head and prompt lookup. Drafts with a single tree
            (Medusa, Hydra, load()'s default) compete with it.

    Raises:
        ValueError: too few prompts, or a head that does not fit.
        OSError: if the winner cannot be written; what was measured is logged.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    check_output(Path(settings.output))  # before minutes of measuring
    bed = bed or open_bed(BenchSettings(target=settings.target, dtype=settings.dtype, device=settings.device))
    proposing, confirming = _split(bed, settings)
    curve = cost_curve(bed.target)
    found = (sources, []) if sources is not None else find_sources(bed, settings.draft, LARGEST)
    proposed = list(found[1])
    for source in found[0]:
        proposed += _propose(bed, source, proposing, curve, settings.finalists)
    contestants = [Candidate("plain", None, None, None), *_unique(proposed)]
    records = _confirm(bed, contestants, confirming)
    rows = [_row(candidate, records[candidate.label]) for candidate in contestants]
    best = max(range(len(rows)), key=lambda i: float(rows[i]["tokens_per_second"]))
    choice, path, text = _choice(bed, contestants[best]), Path(settings.output), _table(rows, rows[best]["label"])
    evidence = {
        "settings": asdict(settings), "environment": environment(bed), "cost_curve": curve, "contestants": rows,
        "prompts": {"proposing": len(proposing), "confirming": len(confirming)},
    }  # fmt: skip
    report = TuneReport(choice, path, rows, text)
    _write(report, evidence)
    return report


def _write(report: TuneReport, evidence: dict[str, Any]) -> None:
    try:
        report.path.parent.mkdir(parents=True, exist_ok=True)
        write_tuned(report.path, report.choice, evidence)
    except OSError:
        logger.warning("%s\n%s is the fastest here, but cannot be written", report.text, report.choice.method)
        raise


def _split(bed: Bed, settings: TuneSettings) -> tuple[list[Case], list[Case]]:
    """Splits the prompts into those that propose and those that confirm; logs those that exceed the context."""
    cases = []
    for question in load_questions(settings.prompts):
        prompt = tuple(encode_turns(bed, question.turns[:1], ()))
        if len(prompt) + settings.max_new_tokens > bed.target.shape.max_positions:
            logger.info("skipped: %s question %s is longer than the context", question.task, question.id)
            continue
        cases.append(
            Case(
                question.task, (question.id,), 0, (prompt,), settings.temperature, settings.max_new_tokens,
                settings.seed,
            )
        )  # fmt: skip
    if len(cases) < 2:
        raise ValueError(f"tuning needs at least 2 prompts that fit the context, got {len(cases)}; give more")
    count = min(settings.num_prompts, len(cases))
    chosen = [cases[i * len(cases) // count] for i in range(count)]
    return chosen[::2], chosen[1::2]


def _propose(
    bed: Bed, source: Source, cases: Sequence[Case], curve: Sequence[dict[str, float]], count: int
) -> list[Candidate]:
    """Returns the best trees of a family by prediction, without near-copies, and its default."""
    profile, costs = _profile(bed, source, cases, curve)
    if not profile.steps:
        return []
    ranked = sorted((predict(profile, costs, policy) for policy in source.options), key=lambda p: -p.tokens_per_second)
    chosen: list[Prediction] = []
    for prediction in ranked:
        # Neighbours in the ranking are near-copies: take trees that differ.
        if all(_differs(prediction, other) for other in chosen):
            chosen.append(prediction)
        if len(chosen) == count:
            break
    found = [
        Candidate(f"{source.name} {tree_text(p.policy)}", source.draft, p.policy, source.make(p.policy), p)
        for p in chosen
    ]
    if source.default is not None:
        known = isinstance(source.default, Chain | DynamicTree)
        expected = predict(profile, costs, source.default) if known else None  # type: ignore[arg-type]
        label = f"{source.name} {tree_text(source.default)}"
        found.append(Candidate(label, source.draft, source.default, source.make(source.default), expected))
    return found


def _differs(first: Prediction, second: Prediction) -> bool:
    nodes = abs(first.nodes - second.nodes) >= 0.15 * max(first.nodes, second.nodes)
    return nodes or abs(first.tokens_per_step - second.tokens_per_step) >= 0.05


def _profile(
    bed: Bed, source: Source, cases: Sequence[Case], curve: Sequence[dict[str, float]]
) -> tuple[Profile, Costs]:
    """Verifies the probe tree on the proposing prompts, and times the drafter's levels."""
    probe = Recorder(source.make(source.probe))
    wide = [measure(bed, Method("probe", probe, ""), case) for case in cases]
    chain = source.probe if isinstance(source.probe, Chain) else Chain(min(PROBE_CHAIN, source.probe.depth))
    drafter = source.make(chain)
    narrow = [measure(bed, Method("chain", drafter, ""), case) for case in cases]
    steps = max(sum(r.steps for r in narrow), 1)
    spent = {name: sum(r.phases.get(name, 0.0) for r in narrow) / steps for name in ("draft", "extend")}
    level = spent["draft"] / chain.depth
    top_k = source.probe.top_k if isinstance(source.probe, DynamicTree) else 1
    wide_draft = sum(r.phases.get("draft", 0.0) for r in wide) / max(sum(r.steps for r in wide), 1)
    wide_level = (wide_draft - level) / max(source.probe.depth - 1, 1) if top_k > 1 else level
    rest = spent["extend"] + sum(_rest(r) for r in narrow) / steps
    return make_profile(probe.steps), Costs(curve, level, max(wide_level, level), top_k, rest)


def _rest(record: Record) -> float:
    """Returns a record's seconds outside prefill and forwards."""
    named = sum(record.phases.get(name, 0.0) for name in ("prefill", "draft", "target", "extend"))
    return max(0.0, record.seconds - named)


def _unique(found: Sequence[Candidate]) -> list[Candidate]:
    return list({candidate.label: candidate for candidate in reversed(found)}.values())[::-1]


def _confirm(bed: Bed, contestants: Sequence[Candidate], cases: Sequence[Case]) -> dict[str, list[Record]]:
    """Measures every contestant on every confirming prompt, in turn, after one round to warm up."""
    methods = [Method(candidate.label, candidate.drafter, "") for candidate in contestants]
    for method in methods:
        measure(bed, method, cases[0])
    records: dict[str, list[Record]] = {method.label: [] for method in methods}
    for number, case in enumerate(cases):
        shift = number % len(methods)
        for method in methods[shift:] + methods[:shift]:
            records[method.label].append(measure(bed, method, case))
    return records


def _row(candidate: Candidate, records: Sequence[Record]) -> dict[str, Any]:
    prediction, steps = candidate.prediction, sum(r.steps for r in records)
    return {
        "label": candidate.label,
        "draft": candidate.draft,
        "tree": None if candidate.policy is None else tree_text(candidate.policy),
        "predicted_tau": None if prediction is None else prediction.tokens_per_step,
        "predicted_tokens_per_second": None if prediction is None else prediction.tokens_per_second,
        "tau": 1 + sum(r.accepted for r in records) / max(steps, 1),
        "tokens_per_second": sum(r.tokens for r in records) / sum(r.seconds for r in records),
    }


def _choice(bed: Bed, winner: Candidate) -> TunedChoice:
    from aquiline.models.resolve import target_fingerprint

    fingerprint = None if bed.path is None else target_fingerprint(bed.path)
    return TunedChoice(winner.label, winner.draft, winner.policy, fingerprint)


def _table(rows: Sequence[dict[str, Any]], best: str) -> str:
    lines = ["| | contestant | predicted tokens/s (decoding) | measured tokens/s | τ |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: -float(row["tokens_per_second"])):
        predicted = row["predicted_tokens_per_second"]
        mark = "→" if row["label"] == best else ""
        guess = "–" if predicted is None else f"{predicted:.1f}"
        lines.append(f"| {mark} | {row['label']} | {guess} | {row['tokens_per_second']:.1f} | {row['tau']:.2f} |")
    return "\n".join(lines)
