"""What the papers found, which heads and methods test it, and how ours compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BATCH_METHOD = "eagle3:chain"
"""Method whose speedup is measured by batch size."""

EQUAL_DYNAMIC = "dynamic:num_nodes=26:depth=5:top_k=4"
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
        methods: what it is measured with.
    """

    name: str
    kind: str
    fields: tuple[tuple[str, Any], ...]
    methods: tuple[str, ...]

    def training(self, num_layers: int) -> dict[str, Any]:
        """Fields of the training settings for a target of `num_layers` layers."""
        given = {"kind": self.kind, **dict(self.fields)}
        if given.get("layers") == "top":
            given["layers"] = (num_layers,)
        return given


HEADS = (
    HeadSpec("eagle", "eagle", (("inputs", "feature+shifted"),), _EAGLE_TREES),
    HeadSpec("eagle-unshifted", "eagle", (("inputs", "feature+unshifted"),), ("eagle:chain",)),
    HeadSpec("eagle-feature", "eagle", (("inputs", "feature"),), ("eagle:chain",)),
    HeadSpec("eagle-token", "eagle", (("inputs", "token"),), ("eagle:chain",)),
    HeadSpec("eagle3", "eagle3", (), _EAGLE3_TREES),
    HeadSpec("eagle3-feature-loss", "eagle3", (("feature_weight", 1.0),), _EAGLE3_TREES),
    HeadSpec("eagle3-top-feature", "eagle3", (("layers", "top"),), _EAGLE3_TREES),
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
)  # fmt: skip

Runs = Mapping[str, Sequence[Mapping[str, Any]]]


def compare(comparison: Comparison, runs: Runs) -> dict[str, Any]:
    """τ and n-α of both sides over all seeds, and whether the paper's order holds.

    Returns:
        ``holds``: the means are in the paper's order; ``separated``: every seed of the better
        side lies above every seed of the other.
    """
    better, worse = (_values(runs, *side) for side in (comparison.better, comparison.worse))
    return {
        "name": comparison.name,
        "claim": comparison.claim,
        "paper": comparison.paper,
        "better": {"head": comparison.better[0], "method": comparison.better[1], **better},
        "worse": {"head": comparison.worse[0], "method": comparison.worse[1], **worse},
        "holds": _mean(better["tau"]) > _mean(worse["tau"]),
        "separated": min(better["tau"]) > max(worse["tau"]),
    }


def _values(runs: Runs, head: str, method: str) -> dict[str, list[Any]]:
    cells = [cell for run in runs[head] for cell in run["cells"] if (cell["method"], cell["batch"]) == (method, 1)]
    return {
        "tau": [cell["tau"]["value"] for cell in cells],
        "alpha": [cell["alpha"] for cell in cells if "alpha" in cell],
        "speedup": [cell["speedup_vs_plain"]["median"] for cell in cells],
        "ece": [cell["ece"] for cell in cells if "ece" in cell],
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def render_findings(results: Mapping[str, Any]) -> str:
    """The findings as Markdown tables."""
    lines = [
        f"Target {results['environment']['target']}, {results['settings']['positions']:,} positions a head, seeds "
        f"{', '.join(map(str, results['settings']['seeds']))}. τ and speedups: mean over seeds (lowest–highest).",
        "",
        "| claim | better: τ | worse: τ | order | the paper |",
        "|---|---|---|---|---|",
    ]
    for c in results["comparisons"]:
        order = "holds in every seed" if c["separated"] else "holds on average" if c["holds"] else "does not hold"
        sides = [f"{s['head']}, {s['method']}: {_spread(s['tau'])}" for s in (c["better"], c["worse"])]
        lines.append(f"| {c['claim']} | {sides[0]} | {sides[1]} | {order} | {c['paper']} |")
    lines += ["", *_alpha_lines(results["runs"]), *_batch_lines(results["runs"])]
    if results["positions"]:
        lines += _position_lines(results["positions"])
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float]) -> str:
    return f"{_mean(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def _alpha_lines(runs: Runs) -> list[str]:
    lines = ["n-α of chains, mean over seeds, and ECE:", "", "| head | 0-α | 1-α | 2-α | 3-α | 4-α | ECE |"]
    lines.append("|---|---|---|---|---|---|---|")
    for head in runs:
        values = _values(runs, head, "eagle:chain" if head.startswith("eagle-") or head == "eagle" else BATCH_METHOD)
        if not values["alpha"]:
            continue
        depth = min(5, *(len(alpha) for alpha in values["alpha"]))
        means = [f"{_mean([alpha[n] for alpha in values['alpha']]):.3f}" for n in range(depth)]
        error = f"{_mean(values['ece']):.3f}" if values["ece"] else "–"
        lines.append(f"| {head} | {' | '.join([*means, *['–'] * (5 - depth)])} | {error} |")
    return lines


def _batch_lines(runs: Runs) -> list[str]:
    cells = [
        cell for seeds in runs.values() for run in seeds[:1] for cell in run["cells"]
        if cell["method"] == BATCH_METHOD and cell["batch"] > 1
    ]  # fmt: skip
    if not cells:
        return []
    lines = ["", "Speedup of a chain by batch size:", ""]
    for head, seeds in runs.items():
        mine = [c for c in seeds[0]["cells"] if c["method"] == BATCH_METHOD]
        if len(mine) > 1:
            values = [f"{c['batch']}: {c['speedup_vs_plain']['median']:.2f}x" for c in mine]
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
