"""Answers "is it really lossless?": compares outputs with drafts to plain decoding's, on a user's model and prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from aquiline.bench.agreement import complaint, find_divergences
from aquiline.bench.measure import Case, measure
from aquiline.bench.methods import Bed, Method
from aquiline.bench.records import Record
from aquiline.bench.runner import open_bed
from aquiline.bench.settings import BenchSettings
from aquiline.check.report import markdown
from aquiline.check.run import Advance, prompt_cases
from aquiline.check.settings import CheckSettings
from aquiline.checkpoints.open import open_head, shipped_for
from aquiline.drafters.trees import DynamicTree, tree_text
from aquiline.engine.drafting import make_drafter

TREE = DynamicTree(16, 4, 4)
"""A branching tree, tried beside the default of an EAGLE head."""

BATCH = 4
"""Rows of the batches that are tried beside single requests."""

PLAIN = Method("plain", None, "")


@dataclass(frozen=True)
class Row:
    """Outputs of one method under one condition.

    Attributes:
        method: what drafted.
        temperature: 0 is greedy; above, outputs are drawn with one seed each.
        batch: requests decoded together.
        outputs: compared outputs.
        equal: those that are plain decoding's, token for token.
        near_ties: those that part where rounding may decide.
        errors: those that hold a token which plain decoding would not emit.
    """

    method: str
    temperature: float
    batch: int
    outputs: int
    equal: int
    near_ties: int
    errors: int


@dataclass(frozen=True, eq=False)
class LosslessReport:
    """A finished comparison.

    Attributes:
        exact: the target's bits do not depend on the forward, so that every divergence is an error.
        rows: by method, temperature and batch.
        divergences: as docs/results-schema.md describes them, with their temperature.
        complaint: the errors in a line, or None.
    """

    exact: bool
    rows: Sequence[Row]
    divergences: Sequence[dict[str, Any]]
    complaint: str | None

    @property
    def passed(self) -> bool:
        """Whether no output holds a wrong token."""
        return self.complaint is None


def check_lossless(
    settings: CheckSettings, bed: Bed | None = None, advance: Advance = lambda *_: None
) -> LosslessReport:
    """Compares greedy and seeded outputs, single and in batches, with default drafts and with a branching tree.

    Args:
        settings: the check; without a head, load()'s default drafts.
        bed: a loaded target; None loads the one that the settings name.
        advance: told about the progress.

    Raises:
        ValueError: a head that does not fit, a draft that samples, or no prompt that fits the context.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    bed = bed or open_bed(BenchSettings(target=settings.target, dtype=settings.dtype, device=settings.device))
    methods = _methods(settings.head or "auto", bed)
    cases = prompt_cases(settings, bed)
    total, done = 2 * len(cases) * (1 + 2 * len(methods)), 0

    def run(method: Method, case: Case) -> Record:
        nonlocal done
        record = measure(bed, method, case)
        done += len(case.prompts)
        advance("outputs", done, total)
        return record

    rows, divergences = [], list[dict[str, Any]]()
    for temperature in (0.0, settings.temperature):
        singles = [replace(case, temperature=temperature, seed=settings.seed) for case in cases]
        plain = [run(PLAIN, case) for case in singles]
        for method in methods:
            for size in (1, BATCH):
                parted = _compared(bed, method, singles, plain, size, run)
                rows.append(_row(bed, method, temperature, size, len(cases), parted))
                divergences += parted
    return LosslessReport(
        bed.target.exact, rows, divergences, complaint(divergences, bed.target.dtype, bed.target.exact)
    )


def _compared(
    bed: Bed, method: Method, cases: Sequence[Case], plain: Sequence[Record], size: int,
    run: Callable[[Method, Case], Record],
) -> list[dict[str, Any]]:  # fmt: skip
    """Divergences of a method from plain decoding's single outputs, at most one for each prompt."""
    parted = []
    for start in range(0, len(cases), size):
        some, known = cases[start : start + size], plain[start : start + size]
        prompts = tuple(case.prompts[0] for case in some)
        ids = tuple(case.questions[0] for case in some)
        record = run(method, replace(some[0], prompts=prompts, questions=ids))
        reference = replace(known[0], questions=list(ids), outputs=[one.outputs[0] for one in known])
        parted += find_divergences(bed.target, [record], reference, prompts, some[0].seed)
    return parted


def _row(
    bed: Bed, method: Method, temperature: float, size: int, outputs: int, parted: Sequence[dict[str, Any]]
) -> Row:
    wrong = sum(complaint([each], bed.target.dtype, bed.target.exact) is not None for each in parted)
    return Row(method.label, temperature, size, outputs, outputs - len(parted), len(parted) - wrong, wrong)


def _methods(draft: str, bed: Bed) -> list[Method]:
    made = make_drafter(draft, None, bed.target, bed.path)
    if made.drafter is None:
        raise ValueError(f"head is {draft!r}; allowed: a draft, or leave it out for load()'s default")
    found = [Method(made.name, made.drafter, "")]
    heads = shipped_for(bed.path) if draft == "auto" else [] if draft in ("prompt-lookup", "lookahead") else [draft]
    if any(open_head(head, bed.target.shape).kind in ("eagle", "eagle3") for head in heads[:1]):
        made = make_drafter(draft, TREE, bed.target, bed.path)
        found.append(Method(f"{made.name}, {tree_text(TREE)}", made.drafter, ""))
    return found


def lossless_json(report: LosslessReport) -> dict[str, Any]:
    """JSON-able values."""
    return {
        "passed": report.passed, "exact": report.exact, "rows": [asdict(row) for row in report.rows],
        "divergences": list(report.divergences), "complaint": report.complaint,
    }  # fmt: skip


def lossless_text(report: LosslessReport) -> str:
    """A table and the verdict."""
    rows = [
        [row.method, f"{row.temperature:g}", str(row.batch), f"{row.equal} of {row.outputs}", str(row.near_ties),
         str(row.errors)]
        for row in report.rows
    ]  # fmt: skip
    table = markdown(["drafts", "temperature", "batch", "equal to plain", "near-ties", "errors"], rows)
    if report.complaint is not None:
        return f"{table}\n\nNOT lossless: {report.complaint}"
    ties = sum(row.near_ties for row in report.rows)
    if ties:
        return f"{table}\n\nlossless up to rounding: {ties} outputs part at near-ties, and no token is wrong"
    count = sum(row.outputs for row in report.rows)
    return f"{table}\n\nlossless: all {count} outputs are plain decoding's, token for token"
