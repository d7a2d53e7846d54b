"""The model card that a trained head carries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from aquiline.training.settings import settings_record
from aquiline.training.state import Run
from aquiline.training.validation import Acceptance


def write_card(run: Run, acceptance: Mapping[str, Acceptance]) -> Path:
    """Writes README.md into the head's folder.

    Args:
        run: the finished run.
        acceptance: what was measured, by validation set.

    Returns:
        The file.
    """
    path = Path(run.settings.output) / "head" / "README.md"
    sections = [_title(run), _quality(acceptance)]
    sections += [_calibration(acceptance)] if acceptance else []
    sections.append(_recipe(run))
    path.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return path


def _title(run: Run) -> str:
    config = run.head.config
    name = "EAGLE-3" if config.kind == "eagle3" else "EAGLE-1/2"
    target = Path(run.settings.target).name
    return (
        f"# {name} draft head for {target}\n\n"
        f"Drafts {config.draft_vocab_size:,} of {config.vocab_size:,} tokens from the target "
        f"features {', '.join(map(str, config.features))}. Layout: SafeAILab.\n\n"
        f"Target fingerprint: `{run.head.target_fingerprint}`\n\n"
        f"    aquiline generate --target {target} --draft THIS_FOLDER"
    )


def _quality(acceptance: Mapping[str, Acceptance]) -> str:
    title = "## Acceptance on held-out conversations"
    if not acceptance:
        return f"{title}\n\nIt was not measured: no conversation was held out."
    lines = [
        title,
        "",
        "n-α: share accepted at depth n+1 of those accepted at depth n, greedy chain. τ: tokens "
        "per target forward, the target's own included.",
        "",
        "| data | rows | 0-α | 1-α | 2-α | 3-α | 4-α | τ chain of 5 | τ fixed tree |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, measured in acceptance.items():
        alphas = " | ".join(f"{alpha:.3f}" for alpha in measured.alphas[:5])
        lines.append(
            f"| {Path(name).name} | {measured.rows:,} | {alphas} | {measured.tau_chain:.2f} | {measured.tau_tree:.2f} |"
        )
    return "\n".join(lines)


def _calibration(acceptance: Mapping[str, Acceptance]) -> str:
    lines = ["## Calibration of the first draft"]
    for name, measured in acceptance.items():
        lines += [
            "",
            f"{Path(name).name}: expected calibration error {measured.calibration_error:.3f}.",
            "",
            "| rows | mean confidence | accepted |",
            "|---|---|---|",
        ]
        lines += [f"| {n:,} | {c:.3f} | {a:.3f} |" for n, c, a in measured.calibration if n]
    return "\n".join(lines)


def _recipe(run: Run) -> str:
    data = {
        Path(s.path).name: {
            "fingerprint": s.fingerprint,
            "counts": s.manifest.get("counts", {}).get("train"),
            "sources": s.manifest.get("sources"),
        }
        for s in run.mixture.sets
    }
    return (
        f"## Recipe\n\n{run.seen:,} positions in {run.step:,} optimiser steps.\n\n"
        f"```json\n{json.dumps(settings_record(run.settings), indent=2)}\n```\n\n"
        f"Training sets:\n\n```json\n{json.dumps(data, indent=2)}\n```"
    )
