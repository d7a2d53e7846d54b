"""Writes the model card of a trained head."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aquiline.models.files import write_text
from aquiline.training.learners.learner import Acceptance
from aquiline.training.run import Run
from aquiline.training.settings import settings_record

TITLES = {
    "eagle3": "EAGLE-3 draft head",
    "eagle": "EAGLE-1/2 draft head",
    "medusa": "Medusa heads",
    "hydra": "Hydra heads",
    "small-model": "Small draft model",
}


def write_card(run: Run) -> Path:
    """Writes README.md into the head's folder.

    Args:
        run: the finished run; its acceptance was measured.

    Returns:
        The file.
    """
    path = run.output / "head" / "README.md"
    sections = [_title(run), _quality(run.measured, run.settings.kind != "small-model")]
    sections += [_calibration(run.measured), _coupling(run.measured)] if run.measured else []
    sections.append(_recipe(run))
    write_text(path, "\n\n".join(sections) + "\n")
    return path


def _title(run: Run) -> str:
    target = Path(run.settings.target).name
    return (
        f"# {TITLES[run.settings.kind]} for {target}\n\n{run.learner.describe()}\n\n"
        f"Target fingerprint: `{run.learner.fingerprint}`\n\n"
        f"    aquiline generate --target {target} --draft THIS_FOLDER"
    )


def _quality(acceptance: Mapping[str, Acceptance], trees: bool) -> str:
    """Tabulates the acceptance; `trees`: the drafts can be trees, too."""
    title = "## Acceptance on held-out conversations"
    if not acceptance:
        return f"{title}\n\nNot measured: no conversation was held out."
    depths = min(5, *(len(measured.alphas) for measured in acceptance.values()))
    lines = [
        title,
        "",
        "n-α: share accepted at depth n+1 of those accepted at depth n, greedy chain. τ: tokens "
        "per target forward, the target's own included.",
        "",
        f"| data | positions | {' | '.join(f'{n}-α' for n in range(depths))} | τ chain of {depths} |"
        + " τ fixed tree |" * trees,
        "|---" * (depths + 3 + trees) + "|",
    ]
    for name, measured in acceptance.items():
        alphas = " | ".join(f"{alpha:.3f}" for alpha in measured.alphas[:depths])
        lines.append(
            f"| {Path(name).name} | {measured.positions:,} | {alphas} | {measured.tau_chain:.2f} |"
            + f" {measured.tau_tree:.2f} |" * trees
        )
    return "\n".join(lines)


def _calibration(acceptance: Mapping[str, Acceptance]) -> str:
    lines = ["## Calibration of the first draft"]
    for name, measured in acceptance.items():
        lines += [
            "",
            f"{Path(name).name}: expected calibration error {measured.calibration_error:.3f}.",
            "",
            "| positions | mean confidence | accepted |",
            "|---|---|---|",
        ]
        lines += [f"| {n:,} | {c:.3f} | {a:.3f} |" for n, c, a in measured.calibration if n]
    return "\n".join(lines)


def _coupling(acceptance: Mapping[str, Acceptance]) -> str:
    name, measured = next(iter(acceptance.items()))  # the set that decides γ
    title = "## Drafts at temperature 1"
    if measured.gamma is None:
        return f"{title}\n\nγ was not measured."
    head = " | ".join(f"γ = {gamma:g}" for gamma in measured.coupled)
    shares = " | ".join(f"{share:.3f}" for share in measured.coupled.values())
    return (
        f"{title}\n\nFirst drafts accepted when draft and target race with the same noise, the draft's probabilities "
        f"to the power of γ; γ = {measured.gamma:g} is stored with the head.\n\n"
        f"| data | {head} |\n{'|---' * (len(measured.coupled) + 1)}|\n| {Path(name).name} | {shares} |"
    )


def _recipe(run: Run) -> str:
    data = {
        Path(s.path).name: {
            "fingerprint": s.fingerprint,
            "counts": s.manifest.get("counts", {}).get("train"),
            "sources": s.manifest.get("sources"),
        }
        for s in run.mixture.sets
    }
    settings = {name: _portable(value) for name, value in settings_record(run.settings).items()}
    return (
        f"## Recipe\n\n{run.seen:,} positions in {run.step:,} optimiser steps.\n\n"
        f"```json\n{json.dumps(settings, indent=2)}\n```\n\n"
        f"Training sets:\n\n```json\n{json.dumps(data, indent=2)}\n```"
    )


def _portable(value: Any) -> Any:
    """Cuts absolute paths to their last part: a card is published, and a home folder is private."""
    if isinstance(value, list):
        return [_portable(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
