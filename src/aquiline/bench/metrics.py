"""Computes the numbers of a report, as pure functions of the raw records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from aquiline.bench.records import Record, pooled_gaps
from aquiline.engine.text import common_prefix

DEFINITIONS = {
    "speedup": "Seconds of the reference for the same prompt divided by the method's, both per emitted token and "
    "prefill included; the median over the prompts that the reference ran on. The reference is plain decoding in the "
    "same engine (the mean of its runs of the prompt), or `generate` of transformers.",
    "tokens_per_second": "Emitted tokens of all rows divided by the seconds from the call to the last token, prefill "
    "included; the median over prompts.",
    "decode_tokens_per_second": "Emitted tokens after the first divided by the seconds after the first token; the "
    "median over prompts.",
    "decode_speedup_vs_plain": "The method's decode tokens per second divided by plain decoding's for the same prompt "
    "(the mean of its runs); the median over prompts.",
    "tau": "τ, mean accept length: emitted tokens per target forward = 1 + accepted drafts / forwards, the papers' "
    "definition with its +1, over all forwards of the cell (prefill not counted).",
    "alpha": "n-α, for chain drafts: of the drafts at depth n + 1 below accepted ones, the share accepted.",
    "acceptance_by_depth": "Share of forwards that accepted a draft at this depth or deeper.",
    "nodes_per_step": "Drafted nodes per target forward, the root not counted.",
    "first_token_seconds": "From the call to the first emitted token.",
    "inter_token_seconds": "A step that emitted k tokens after s seconds counts as k latencies of s / k; all rows and "
    "prompts pooled.",
    "phases": "Share of the time by phase: prefill; draft (making the tree); target (its forward on the tree); accept "
    "(choosing the path); commit (moving keys and values); extend (taking accepted tokens into the drafter); other.",
    "memory": "Peak resident memory of the process during the run (on a GPU: peak allocated), and how much of it was "
    "added by the run. All methods of a report live in one process, so the first includes every loaded head.",
    "interval": "Percentile bootstrap, 95 %, over questions; both turns of a question are drawn together.",
    "plain_spread": "The two plain runs of a prompt that has two: larger seconds divided by smaller, minus 1.",
    "ece": "Expected calibration error: mean distance between the draft's confidence in a token and the share of such "
    "tokens accepted, over 20 bins of confidence, weighted by their size. Judged are nodes whose parent was accepted.",
}
"""Definitions of the numbers, which every report includes."""

PLAIN = "plain"
HF = "hf"
FIRST_TURNS = "first turns"
RESAMPLES = 1000
BINS = 20


def summarise(records: Sequence[Record], chains: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Makes one cell for each (temperature, batch, method, task), and one with task "all".

    Larger batches hold first turns alone. Where such a task has second turns too, "TASK, first
    turns" is a further cell of its single questions, which the larger batches compare with.

    Args:
        records: raw records.
        chains: labels of the methods that draft chains, for which n-α is defined.

    Returns:
        JSON-able cells in the order of first appearance.
    """
    references = {name: _seconds_per_token(records, name) for name in (PLAIN, HF)}
    plain_rates = _decode_rates(records)
    chains = frozenset(chains)
    groups: dict[tuple[float, int, str, str], list[Record]] = {}
    partial = {r.task for r in records if r.turn} & {r.task for r in records if r.batch > 1}
    for record in records:
        tasks = [record.task, "all"]
        if record.task in partial and record.batch == 1 and record.turn == 0:
            tasks.append(f"{record.task}, {FIRST_TURNS}")
        for task in tasks:
            groups.setdefault((record.temperature, record.batch, record.method, task), []).append(record)
    return [
        {"temperature": t, "batch": b, "method": method, "task": task}
        | _cell(group, references, plain_rates, chain=method in chains)
        for (t, b, method, task), group in groups.items()
    ]


def _seconds_per_token(records: Sequence[Record], method: str) -> dict[tuple[Any, ...], float]:
    """Case → seconds per token of a reference, the mean of its runs."""
    runs = _runs([r for r in records if r.tokens], method, lambda record: record.seconds / record.tokens)
    return {case: sum(values) / len(values) for case, values in runs.items()}


def _runs(
    records: Sequence[Record], method: str, value: Callable[[Record], float]
) -> dict[tuple[Any, ...], list[float]]:
    """Case → a value of each of a method's runs."""
    runs: dict[tuple[Any, ...], list[float]] = {}
    for record in records:
        if record.method == method:
            runs.setdefault(record.case, []).append(value(record))
    return runs


def _decode_rates(records: Sequence[Record]) -> dict[tuple[Any, ...], float]:
    """Case → plain decoding's tokens per second after the first, the mean of its runs."""
    runs = _runs([r for r in records if _decode_rate(r)], PLAIN, lambda record: _decode_rate(record) or 0.0)
    return {case: sum(values) / len(values) for case, values in runs.items()}


def _cell(
    records: Sequence[Record],
    references: Mapping[str, Mapping[tuple[Any, ...], float]],
    plain_rates: Mapping[tuple[Any, ...], float],
    *,
    chain: bool,
) -> dict[str, Any]:
    gaps = pooled_gaps(records)
    firsts = [s for record in records for s in record.first_token_seconds]
    steps = sum(r.steps for r in records)
    cell: dict[str, Any] = {
        "prompts": len({r.case for r in records}),
        "tokens": sum(r.tokens for r in records),
        "seconds": sum(r.seconds for r in records),
        "tokens_per_second": median_interval(records, lambda r: r.tokens / r.seconds),
        "decode_tokens_per_second": median_interval(records, _decode_rate),
        "first_token_seconds": _percentiles(firsts),
        "inter_token_seconds": _percentiles(gaps),
        "phases": _phases(records),
        "memory": {
            "peak_bytes": max((r.memory["peak"] for r in records if r.memory), default=None),
            "added_bytes": max((r.memory["peak"] - r.memory["before"] for r in records if r.memory), default=None),
        },
    }
    for name, reference in references.items():
        ratio = _speedup(reference)
        cell[f"speedup_vs_{name}"] = median_interval(records, ratio)
    cell["decode_speedup_vs_plain"] = median_interval(records, _decode_speedup(plain_rates))
    if steps:
        cell["tau"] = tau(records)
        cell["nodes_per_step"] = sum(r.nodes for r in records) / steps
        cell["acceptance_by_depth"] = [count / steps for count in _added(r.accepted_at for r in records)]
        if chain:
            cell["alpha"] = alpha(records)
        bins = _added_bins(r.calibration for r in records)
        if bins:
            cell["calibration"] = bins
            cell["ece"] = ece(bins)
    return cell


def tau(records: Sequence[Record]) -> dict[str, float]:
    """Computes τ with its interval; 1 for plain decoding. The first token of a row comes from its prefill."""
    pairs = [(float(r.tokens - len(r.outputs)), float(r.steps)) for r in records]
    value = sum(tokens for tokens, _ in pairs) / sum(steps for _, steps in pairs)
    sums = np.nansum(_resampled(records, pairs), axis=(1, 2))
    low, high = np.percentile(sums[:, 0] / np.maximum(sums[:, 1], 1), (2.5, 97.5))
    return {"value": value, "low": float(low), "high": float(high)}


def alpha(records: Sequence[Record]) -> list[float]:
    """n-α for n = 0, 1, …: accepted at depth n + 1 of those offered below an accepted node."""
    accepted = _added(r.accepted_at for r in records)
    offered = _added(r.offered_at for r in records)
    return [a / o if o else 0.0 for a, o in zip(accepted, offered, strict=True)]


def ece(bins: Sequence[tuple[int, float, int]]) -> float:
    """Expected calibration error of [judged, sum of confidences, accepted] bins."""
    total = sum(count for count, _, _ in bins)
    return sum(abs(confidence - accepted) for _, confidence, accepted in bins) / total if total else 0.0


def plain_spread(records: Sequence[Record]) -> dict[str, float | int]:
    """Measures how far two plain runs of the same prompt lie apart: the noise of the machine."""
    runs = _runs(records, PLAIN, lambda record: record.seconds)
    spreads = [max(pair) / min(pair) - 1 for pair in runs.values() if len(pair) > 1]
    if not spreads:
        return {"pairs": 0}
    return {"pairs": len(spreads), "median": float(np.median(spreads)), "p95": float(np.percentile(spreads, 95))}


def agreement(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Compares outputs with plain decoding's, token for token, per temperature, batch and method.

    Returns:
        Cells with the number of compared outputs, the equal ones, the tokens before the first
        differing one (all of them where equal), and all tokens.
    """
    plain = {r.case: r.outputs for r in records if r.method == PLAIN and r.repeat == 0}
    cells: dict[tuple[float, int, str], dict[str, Any]] = {}
    for record in records:
        if record.case not in plain or (record.method == PLAIN and record.repeat == 0):
            continue
        name = "plain (second run)" if record.method == PLAIN else record.method
        cell = cells.setdefault(
            (record.temperature, record.batch, name),
            {"outputs": 0, "equal": 0, "tokens_before_divergence": 0, "tokens": 0},
        )
        for mine, reference in zip(record.outputs, plain[record.case], strict=True):
            cell["outputs"] += 1
            cell["equal"] += mine == reference
            cell["tokens_before_divergence"] += common_prefix(mine, reference)
            cell["tokens"] += len(reference)
    return [{"temperature": t, "batch": b, "method": name} | cell for (t, b, name), cell in cells.items()]


def median_interval(records: Sequence[Record], value: Callable[[Record], float | None]) -> dict[str, float] | None:
    """Median of a record's value with its bootstrap interval; None if no record has one."""
    pairs = [(record, v) for record in records if (v := value(record)) is not None]
    if not pairs:
        return None
    numbers = [v for _, v in pairs]
    drawn = np.nanmedian(_resampled([record for record, _ in pairs], numbers), axis=(1, 2))
    low, high = np.percentile(drawn, (2.5, 97.5))
    return {"median": float(np.median(numbers)), "low": float(low), "high": float(high)}


def _resampled(records: Sequence[Record], values: Sequence[Any]) -> npt.NDArray[np.float64]:
    """(resamples, questions, values of a question[, …]); missing values are NaN."""
    questions: dict[tuple[str, str], list[Any]] = {}
    for record, value in zip(records, values, strict=True):
        questions.setdefault((record.task, "+".join(record.questions)), []).append(value)
    width = max(len(group) for group in questions.values())
    blank = np.full_like(np.asarray(values[0], dtype=np.float64), np.nan)
    table = np.array([[*group, *[blank] * (width - len(group))] for group in questions.values()], dtype=np.float64)
    # A fixed seed: the report can be recomputed from the raw records to the last digit.
    index = np.random.default_rng(0).integers(len(table), size=(RESAMPLES, len(table)))
    drawn: npt.NDArray[np.float64] = table[index]
    return drawn


def _speedup(reference: Mapping[tuple[Any, ...], float]) -> Callable[[Record], float | None]:
    def ratio(record: Record) -> float | None:
        if record.case not in reference or not record.tokens:
            return None
        return reference[record.case] * record.tokens / record.seconds

    return ratio


def _decode_speedup(plain_rates: Mapping[tuple[Any, ...], float]) -> Callable[[Record], float | None]:
    def ratio(record: Record) -> float | None:
        mine, plain = _decode_rate(record), plain_rates.get(record.case)
        return mine / plain if mine and plain else None

    return ratio


def _decode_rate(record: Record) -> float | None:
    rows = len(record.outputs)
    seconds = record.seconds - min(record.first_token_seconds)
    return (record.tokens - rows) / seconds if record.tokens > rows and seconds > 0 else None


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p95 = np.percentile(values, (50, 95))
    return {"p50": float(p50), "p95": float(p95)}


def _phases(records: Sequence[Record]) -> dict[str, float]:
    """Phase → share of the seconds; the rest is "other"."""
    total = sum(r.seconds for r in records)
    sums: dict[str, float] = {}
    for phase, seconds in (item for record in records for item in record.phases.items()):
        sums[phase] = sums.get(phase, 0.0) + seconds
    if not sums:
        return {}
    sums["other"] = sums.get("other", 0.0) + max(0.0, total - sum(sums.values()))
    return {phase: seconds / total for phase, seconds in sums.items()}


def _added(lists: Iterable[Sequence[int]]) -> list[int]:
    return [sum(counts) for counts in zip_longest(*lists, fillvalue=0)]


def _added_bins(lists: Iterable[Sequence[tuple[int, float, int]]]) -> list[tuple[int, float, int]]:
    filled = [bins for bins in lists if bins]
    return [(sum(b[0] for b in at), sum(b[1] for b in at), sum(b[2] for b in at)) for at in zip(*filled, strict=True)]
