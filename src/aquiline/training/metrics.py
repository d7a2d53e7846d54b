"""Logs a run to its metrics file, the terminal and TensorBoard, and words its messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aquiline.models.files import append_whole, losing_lines
from aquiline.training.learners.learner import Acceptance
from aquiline.training.processes import say
from aquiline.training.run import Run


@dataclass(frozen=True)
class StepReport:
    """Loss, gradient norm, and per depth the distributions' loss and the accuracy of one step."""

    loss: float
    token_loss: list[float]
    accuracy: list[float]
    gradient_norm: float


def log_step(run: Run, report: StepReport, speed: float) -> None:
    """Logs the last step of a run; `speed` is in positions per second."""
    left = max(0, run.decay_to - run.seen) / speed
    record = {
        "step": run.step,
        "positions": run.seen,
        "loss": report.loss,
        "token_loss": report.token_loss,
        "accuracy": report.accuracy,
        "gradient_norm": report.gradient_norm,
        "positions_per_second": speed,
        "lr_factor": run.rate,
        "seconds_left": left,
    }
    line = (
        f"step {run.step:,} · {run.seen:,} of {run.decay_to:,} positions · loss {report.loss:.3f} · "
        f"accuracy {' '.join(f'{a:.3f}' for a in report.accuracy)} · {speed:,.0f} positions/s · "
        f"{left / 60:.0f} min left"
    )
    _log(run, record, line)


def log_acceptance(run: Run, path: str, measured: Acceptance, seconds: float) -> None:
    """Logs the acceptance on a validation split."""
    record = {
        "validation": path,
        "step": run.step,
        "positions": run.seen,
        "alpha": measured.alphas,
        "accuracy": measured.accuracy,
        "rows": measured.positions,
        "tau_chain5": measured.tau_chain,
        "tau_tree": measured.tau_tree,
        "calibration_error": measured.calibration_error,
        "coupled": {f"{gamma:g}": share for gamma, share in measured.coupled.items()},
        "seconds": seconds,
    }
    line = (
        f"validation {path} · n-α {' '.join(f'{a:.3f}' for a in measured.alphas)} · "
        f"τ {measured.tau_chain:.2f} (chain of {min(5, len(measured.alphas))}), {measured.tau_tree:.2f} (fixed tree)"
    )
    _log(run, record, line)


def _log(run: Run, record: dict[str, Any], line: str) -> None:
    if not run.main:
        return
    append_metrics(run.output, record)
    say(line)
    if run.settings.tensorboard:
        with losing_lines(run.output):
            _to_tensorboard(run, record)


def append_metrics(output: Path, record: Mapping[str, Any]) -> None:
    """Adds a line to a run's ``metrics.jsonl``, numbers to five digits; a full disk costs the line, not the run."""
    path = output / "metrics.jsonl"
    line = json.dumps({name: _rounded(value) for name, value in record.items()}) + "\n"
    with losing_lines(path), path.open("ab", buffering=0) as file:
        append_whole(file.fileno(), path, line.encode())


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(v) for v in value]
    return value


def _to_tensorboard(run: Run, record: dict[str, Any]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    prefix = f"validation {record['validation']}/" if "validation" in record else "train/"
    with SummaryWriter(run.settings.output) as writer:
        for name, value in record.items():
            for i, number in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(number, int | float):
                    tag = f"{prefix}{name}/{i}" if isinstance(value, list) else f"{prefix}{name}"
                    writer.add_scalar(tag, number, run.seen)


def name_unmeasured(run: Run) -> None:
    """Names the validation sets without a conversation, before the run."""
    for path in run.settings.validation or run.settings.data:
        if path in run.sets.validation:
            continue
        say(
            f"{path} holds no conversation for validation: acceptance is not measured there; "
            "prepare more conversations, or a larger share (--validation 0.2)"
        )


def divergence(step: int, loss: float, norm: float, output: Path, *, init: bool) -> str:
    """Explains a loss or gradient norm that is not finite, and how to continue.

    Args:
        step: that diverged.
        loss: of the step.
        norm: of its gradient.
        output: folder of the run.
        init: the method can start from the weights of a head.
    """
    told = f"step {step}: loss {loss}, gradient norm {norm}; stopped. "
    if not (output / "checkpoint.pt").is_file():
        return told + "Nothing was saved yet: start again with a lower learning rate (--lr, --muon-lr)"
    weights = f" from its weights (--init {output / 'head'})" if init else ""
    return (
        f"{told}The last checkpoint is good: start in another folder{weights} with a lower learning rate "
        "(--lr, --muon-lr)"
    )
