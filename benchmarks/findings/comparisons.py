"""Compares our measurements with the findings of the papers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aquiline.bench.metrics import FIRST_TURNS

HELD_OUT = "held-out"
"""Task name of teacher-forced measurements."""

BATCH_METHOD = "eagle3:chain"
"""Method whose speedup is measured by batch size."""

EQUAL_DYNAMIC = "dynamic:26,5,4"
"""A dynamic tree as large and as deep as EAGLE-1's static one, so that the shape alone differs."""

_EAGLE_TREES = ("eagle:chain", "eagle:static", f"eagle:{EQUAL_DYNAMIC}")
_EAGLE3_TREES = (BATCH_METHOD, "eagle3:static", f"eagle3:{EQUAL_DYNAMIC}")


@dataclass(frozen=True)
class HeadSpec:
    """A head to train.

    Attributes:
        name: in results.
        kind: "eagle" or "eagle3".
        fields: what differs from the other heads: (field of the training settings, value) pairs.
            The value "top" for layers stands for the target's last boundary.
        methods: what the engine measures it with. The fixed tree and the chain are also measured
            teacher-forced, on held-out conversations.
        inputs: key of `benchmarks.findings.inputs.VARIANTS`, for a head that no engine runs.
    """

    name: str
    kind: str
    fields: tuple[tuple[str, Any], ...]
    methods: tuple[str, ...]
    inputs: str | None = None

    def training(self, num_layers: int) -> dict[str, Any]:
        """Fields of the training settings for a target of `num_layers` layers."""
        given = {"kind": self.kind, **dict(self.fields)}
        if given.get("layers") == "top":
            given["layers"] = (num_layers,)
        return given


_EAGLE1 = (
    ("ttt_steps", 1), ("feature_weight", 1.0), ("token_weight", 0.1), ("feature_noise", 0.1), ("lr", 3e-4),
    ("muon_lr", 0.0),
)  # fmt: skip
"""The paper's losses and noise; its 3e-5 needs far more steps, and Muon's moves are too large for this network."""

_CHAIN = ("eagle:chain",)
_CHAIN3 = (BATCH_METHOD,)

HEADS = (
    HeadSpec("eagle", "eagle", _EAGLE1, _EAGLE_TREES),
    HeadSpec("eagle-unshifted", "eagle", _EAGLE1, _CHAIN, "unshifted"),
    HeadSpec("eagle-feature", "eagle", _EAGLE1, _CHAIN, "feature"),
    HeadSpec("eagle-token", "eagle", _EAGLE1, _CHAIN, "token"),
    HeadSpec("eagle3", "eagle3", (), _EAGLE3_TREES),
    HeadSpec("eagle3-feature-loss", "eagle3", (("feature_weight", 1.0),), _CHAIN3),
    HeadSpec("eagle3-top-feature", "eagle3", (("layers", "top"),), _CHAIN3),
    HeadSpec("eagle3-lk", "eagle3", (("loss", "lk"),), _CHAIN3),
    HeadSpec("eagle3-tv", "eagle3", (("loss", "tv"),), _CHAIN3),
    HeadSpec("eagle3-adamw", "eagle3", (("muon_lr", 0.0),), _CHAIN3),
    HeadSpec("eagle3-random-start", "eagle3", (("start", "random"),), _CHAIN3),
    HeadSpec("eagle-3-steps", "eagle", (*_EAGLE1, ("ttt_steps", 3)), _CHAIN),
)
"""The heads; each is trained on the same positions."""


@dataclass(frozen=True)
class Comparison:
    """A finding: one head and method against another.

    Attributes:
        name: in results.
        claim: what the paper says.
        better: (head, method) that the paper finds better.
        worse: the other.
        paper: the paper's figures, with their model and task.
    """

    name: str
    claim: str
    better: tuple[str, str]
    worse: tuple[str, str]
    paper: str


COMPARISONS = (
    Comparison(
        "tree-chain", "A tree is accepted further than a chain.", ("eagle", "eagle:static"), ("eagle", "eagle:chain"),
        "EAGLE-1, MT-bench, T = 0: τ 3.20 → 3.94 (Vicuna 7B), 3.00 → 3.62 (LLaMA2-Chat 7B)",
    ),
    Comparison(
        "shifted-unshifted", "The token that was sampled removes the feature's uncertainty.",
        ("eagle", "eagle:chain"), ("eagle-unshifted", "eagle:chain"),
        "EAGLE-1, Vicuna 7B, MT-bench: feature + shifted token above feature + unshifted token (figure)",
    ),
    Comparison(
        "unshifted-feature", "Tokens add to features even unshifted.",
        ("eagle-unshifted", "eagle:chain"), ("eagle-feature", "eagle:chain"),
        "EAGLE-1, Vicuna 7B, MT-bench: speedup ≈ 1.9x with the feature alone, 2.8x with the shifted token",
    ),
    Comparison(
        "feature-token", "Features predict features better than tokens predict tokens.",
        ("eagle-feature", "eagle:chain"), ("eagle-token", "eagle:chain"),
        "EAGLE-1, Vicuna 7B, MT-bench: speedup ≈ 1.5x with tokens alone, 1.9x with features alone",
    ),
    Comparison(
        "dynamic-static", "A tree that follows the confidence beats a fixed one.",
        ("eagle", f"eagle:{EQUAL_DYNAMIC}"), ("eagle", "eagle:static"),
        "EAGLE-2 against EAGLE-1, MT-bench, T = 0: τ 3.94 → 4.98 (Vicuna 7B; its dynamic tree has 60 nodes)",
    ),
    Comparison(
        "eagle3-eagle2", "EAGLE-3 is accepted further than EAGLE-2.",
        ("eagle3", f"eagle3:{EQUAL_DYNAMIC}"), ("eagle", f"eagle:{EQUAL_DYNAMIC}"),
        "LLaMA-3.1 8B, MT-bench, T = 0: τ 4.05 → 6.13 (trained on much more data)",
    ),
    Comparison(
        "no-feature-loss", "Without the loss on features the head drafts better.",
        ("eagle3", BATCH_METHOD), ("eagle3-feature-loss", BATCH_METHOD),
        "LLaMA-3.1 8B, MT-bench: τ 4.05 → 5.37 when the feature constraint is removed",
    ),
    Comparison(
        "fused-features", "Low, middle and high features together beat the top one.",
        ("eagle3", BATCH_METHOD), ("eagle3-top-feature", BATCH_METHOD),
        "LLaMA-3.1 8B, MT-bench: τ 5.37 → 6.13 with fused features",
    ),
    Comparison(
        "eagle3-eagle1-chain", "EAGLE-3's acceptance stays level with depth, EAGLE-1's falls.",
        ("eagle3", BATCH_METHOD), ("eagle", "eagle:chain"),
        "LLaMA-3.1 8B, MT-bench: n-α for n = 0 … 7 from .71 to .53 (EAGLE), from .79 to .76 (EAGLE-3)",
    ),
    Comparison(
        "three-steps", "An EAGLE-1 head trained on its own output (HASS) is accepted further.",
        ("eagle-3-steps", "eagle:chain"), ("eagle", "eagle:chain"),
        "HASS against EAGLE-2, LLaMA-3.1 8B, MT-bench, T = 0: τ 4.05 → 4.41 (EAGLE-3, table 1)",
    ),
    Comparison(
        "lk-kl", "A loss on acceptance beats the KL divergence: −log α.", ("eagle3-lk", BATCH_METHOD),
        ("eagle3", BATCH_METHOD), "LK losses (arXiv 2602.23881) claim it for larger targets",
    ),
    Comparison(
        "lk-tv", "−log α trains better than 1 − α, which fades where little is accepted.", ("eagle3-lk", BATCH_METHOD),
        ("eagle3-tv", BATCH_METHOD), "LK losses (arXiv 2602.23881) claim it for larger targets",
    ),
    Comparison(
        "muon-adamw", "Muon for the matrices beats AdamW alone.", ("eagle3", BATCH_METHOD),
        ("eagle3-adamw", BATCH_METHOD), "none: the papers use AdamW",
    ),
    Comparison(
        "target-random", "A start at the target's last layer and LM head beats a random one.", ("eagle3", BATCH_METHOD),
        ("eagle3-random-start", BATCH_METHOD), "none: the papers start at random",
    ),
)  # fmt: skip

Runs = Mapping[str, Sequence[Mapping[str, Any]]]


def comparable(comparison: Comparison, runs: Runs) -> bool:
    """True if both sides of a finding were measured in the same way."""
    return _measured_sides(comparison, runs) is not None


def _measured_sides(comparison: Comparison, runs: Runs) -> tuple[str, list[dict[str, list[Any]]]] | None:
    """("engine" or "held-out", the better and the worse side), the engine first; None: not measured alike."""
    for way in ("engine", HELD_OUT):
        sides = [_values(runs, *side, way) for side in (comparison.better, comparison.worse)]
        if all(side["tau"] for side in sides):
            return way, sides
    return None


def compare(comparison: Comparison, runs: Runs) -> dict[str, Any]:
    """τ and n-α of both sides over all seeds, and whether the paper's order holds.

    Returns:
        ``measured``: "engine" or "held-out", for both sides; ``holds``: the means are in the
        paper's order; ``separated``: every seed of the better side lies above every seed of the other.
    """
    found = _measured_sides(comparison, runs)
    assert found is not None, "see `comparable`"
    way, (better, worse) = found
    return {
        "name": comparison.name,
        "claim": comparison.claim,
        "paper": comparison.paper,
        "measured": way,
        "better": {"head": comparison.better[0], "method": comparison.better[1], **better},
        "worse": {"head": comparison.worse[0], "method": comparison.worse[1], **worse},
        "holds": _mean(better["tau"]) > _mean(worse["tau"]),
        "separated": min(better["tau"]) > max(worse["tau"]),
    }


def _values(runs: Runs, head: str, method: str, way: str) -> dict[str, list[Any]]:
    """τ and the rest over all seeds, from the engine or from held-out conversations."""
    cells = [
        cell for run in runs.get(head, ()) for cell in run["cells"]
        if (cell["method"], cell["batch"]) == (method, 1) and not _of_first_turns(cell)
        and (cell.get("task") == HELD_OUT) == (way == HELD_OUT)
    ]  # fmt: skip
    return {
        "tau": [cell["tau"]["value"] for cell in cells],
        "alpha": [cell["alpha"] for cell in cells if "alpha" in cell],
        "speedup": [cell["speedup_vs_plain"]["median"] for cell in cells if "speedup_vs_plain" in cell],
        "ece": [cell["ece"] for cell in cells if "ece" in cell],
    }


def is_overall(cell: Mapping[str, Any]) -> bool:
    """True for cells over all tasks, and for the batch-1 cells that larger batches compare with."""
    return cell["task"] == "all" or _of_first_turns(cell)


def _of_first_turns(cell: Mapping[str, Any]) -> bool:
    return str(cell.get("task", "all")).endswith(FIRST_TURNS)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def render_findings(results: Mapping[str, Any]) -> str:
    """The findings as Markdown tables."""
    lines = [
        f"Target {results['environment']['target']}, {_origin(results['settings'])}. τ and speedups: mean over seeds "
        "(lowest–highest).",
        "",
        "| claim | better: τ | worse: τ | order | the paper |",
        "|---|---|---|---|---|",
    ]
    for c in results["comparisons"]:
        order = "does not hold"
        if c["holds"]:
            seeds = len(c["better"]["tau"]) * len(c["worse"]["tau"])
            order = "holds" if seeds == 1 else "holds in every seed" if c["separated"] else "holds on average"
        sides = [f"{s['head']}, {s['method']}: {_spread(s['tau'])}" for s in (c["better"], c["worse"])]
        lines.append(f"| {c['claim']} ({c['measured']}) | {sides[0]} | {sides[1]} | {order} | {c['paper']} |")
    lines += ["", *_alpha_lines(results["runs"]), *_validation_lines(results["runs"]), *_batch_lines(results["runs"])]
    if results["positions"]:
        lines += _position_lines(results["positions"])
    return "\n".join(lines) + "\n"


def _origin(settings: Mapping[str, Any]) -> str:
    """Describes the origin of the heads."""
    if settings.get("given"):
        return "heads as given: " + ", ".join(f"{name} = {head}" for name, head in settings["given"])
    return f"{settings['positions']:,} positions a head, seeds {', '.join(map(str, settings['seeds']))}"


def _spread(values: Sequence[float]) -> str:
    return f"{_mean(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def _alpha_lines(runs: Runs) -> list[str]:
    lines = ["n-α of chains, mean over seeds, and ECE:", "", "| head | 0-α | 1-α | 2-α | 3-α | 4-α | ECE |"]
    lines.append("|---|---|---|---|---|---|---|")
    for head in runs:
        method = "eagle:chain" if head.startswith("eagle-") or head == "eagle" else BATCH_METHOD
        values = _values(runs, head, method, "engine")
        if not values["alpha"]:
            values = _values(runs, head, method, HELD_OUT)
        if not values["alpha"]:
            continue
        depth = min(5, *(len(alpha) for alpha in values["alpha"]))
        means = [f"{_mean([alpha[n] for alpha in values['alpha']]):.3f}" for n in range(depth)]
        error = f"{_mean(values['ece']):.3f}" if values["ece"] else "–"
        lines.append(f"| {head} | {' | '.join([*means, *['–'] * (5 - depth)])} | {error} |")
    return lines


def _validation_lines(runs: Runs) -> list[str]:
    """n-α where every assistant token of the validation splits begins a chain: many rows, no engine."""
    lines: list[str] = []
    for head, seeds in runs.items():
        for name in dict.fromkeys(name for run in seeds for name in run.get("validation", {})):
            alphas = [run["validation"][name]["alpha"][:5] for run in seeds if name in run["validation"]]
            means = " | ".join(f"{_mean(column):.3f}" for column in zip(*alphas, strict=True))
            spread = f"{min(a[0] for a in alphas):.3f}–{max(a[0] for a in alphas):.3f}"
            lines.append(f"| {head} | {name} | {means} | {spread} |")
    if not lines:
        return []
    title = "n-α on held-out conversations, teacher-forced, mean over seeds, and the spread of 0-α:"
    return [
        "",
        title,
        "",
        "| head | set | 0-α | 1-α | 2-α | 3-α | 4-α | 0-α lowest–highest |",
        "|---|" + "---|" * 7,
        *lines,
    ]


def _batch_lines(runs: Runs) -> list[str]:
    cells = [
        cell for seeds in runs.values() for run in seeds[:1] for cell in run["cells"]
        if cell["method"] == BATCH_METHOD and cell["batch"] > 1
    ]  # fmt: skip
    if not cells:
        return []
    lines = ["", "Speedup of a chain by batch size, first turns:", ""]
    for head, seeds in runs.items():
        cells = sorted(seeds[0]["cells"], key=_of_first_turns)  # these win over the cell with both turns
        mine = {c["batch"]: c for c in cells if c["method"] == BATCH_METHOD and c["task"] != HELD_OUT}
        if len(mine) > 1:
            values = [f"{size}: {mine[size]['speedup_vs_plain']['median']:.2f}x" for size in sorted(mine)]
            lines.append(f"- {head}: {', '.join(values)}")
    return lines


def _position_lines(positions: Mapping[str, Any]) -> list[str]:
    share = positions["explained"]
    lines = [
        "",
        f"Of the variance of acceptance, the position in the static tree explains {share['position']:.1%}, the draft's "
        f"confidence {share['confidence']:.1%}, both {share['both']:.1%}. Acceptance by position:",
        "",
        "| position | judged | accepted | least confident third | most confident third |",
        "|---|---|---|---|---|",
    ]
    for place, (judged, accepted) in positions["positions"].items():
        thirds = positions["within"].get(place)
        shown = [f"{t:.2f}" for t in thirds] if thirds else ["–", "–"]
        rate = f"{accepted / judged:.2f}" if judged else "–"
        lines.append(f"| {place} | {judged} | {rate} | {shown[0]} | {shown[1]} |")
    return lines
