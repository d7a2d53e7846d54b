"""Compares every output with plain decoding, and judges the divergences."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from aquiline import race
from aquiline.bench.records import Record
from aquiline.cache import commit
from aquiline.decode import PREFILL_CHUNK
from aquiline.engine.text import common_prefix
from aquiline.targets.target import Target, TargetInput


class WrongTokens(RuntimeError):
    """A method emitted tokens that the target would not: a bug in the method or the engine."""


def find_divergences(
    target: Target, records: Sequence[Record], plain: Record, prompts: Sequence[Sequence[int]], seed: int = 0
) -> list[dict[str, Any]]:
    """Compares a case's rows with plain decoding's; one JSON-able entry per differing row.

    Plain decoding's forwards are repeated once per row, however many methods part there.

    Args:
        target: the target.
        records: of the methods, at plain decoding's temperature.
        plain: of plain decoding.
        prompts: token ids of each row.
        seed: of every row's draws, where the temperature is above 0; no top-k or other filter applies.

    Returns:
        Entries as docs/results-schema.md describes a divergence. The noise of 16-bit logits is at least
        the distance of neighbouring numbers: kernels may give these two forwards the same bits, and a
        tree's branches, which sum in another order, others.
    """
    parted: list[tuple[Record, int, int]] = []
    for record in records:
        pairs = enumerate(zip(record.outputs, plain.outputs, strict=True))
        parted += [(record, row, common_prefix(mine, known)) for row, (mine, known) in pairs if mine != known]
    found = []
    logits = {
        row: _logits_at(target, prompts[row], plain.outputs[row], {at for _, other, at in parted if other == row})
        for row in {row for _, row, _ in parted}
    }
    for record, row, at in parted:
        tokens = [output[at] if at < len(output) else -1 for output in (plain.outputs[row], record.outputs[row])]
        single, whole = (_scores(each, plain.temperature, seed, at) for each in logits[row][at])
        gap, noise = _margin(target.dtype, single, whole, tokens)
        place = {"method": record.method, "task": record.task, "question": plain.questions[row], "turn": record.turn}
        place |= {"batch": record.batch, "position": at, "plain_token": tokens[0], "method_token": tokens[1]}
        found.append(place | {"gap": gap, "noise": noise, "near_tie": gap is not None and gap <= 2 * noise})
    return found


@torch.inference_mode()
def _logits_at(
    target: Target, prompt: Sequence[int], output: Sequence[int], positions: Collection[int]
) -> dict[int, tuple[Tensor, Tensor]]:
    """Position of the output → (V,) logits of plain decoding's forwards, and of one forward over the whole text."""
    pieces = [prompt[i : i + PREFILL_CHUNK] for i in range(0, len(prompt), PREFILL_CHUNK)]
    lengths = {len(prompt) + at: at for at in positions}
    text = [*prompt, *output[: max(positions)]]
    single = _forwards(target, [*pieces, *([token] for token in text[len(prompt) :])], lengths)
    whole = {n: _forwards(target, [text[:n]], {n})[n] for n in lengths}
    return {at: (single[n], whole[n]) for n, at in lengths.items()}


def _scores(logits: Tensor, temperature: float, seed: int, position: int) -> Tensor:
    """Returns what the chosen token maximises, (V,): the logits, or the logarithm of a token's speed in the race."""
    if temperature == 0:
        return logits
    return logits / temperature - race.noise(seed, position, len(logits)).to(logits.device).log()


def _margin(dtype: torch.dtype, single: Tensor, whole: Tensor, tokens: Sequence[int]) -> tuple[float | None, float]:
    """Returns the gap between two tokens' scores, and the kernels' noise in these scores."""
    noise = float((single - whole).abs().max())
    if min(tokens) < 0:
        return None, noise
    pair = single[list(tokens)]
    if dtype.itemsize == 2:
        noise = max(noise, torch.finfo(dtype).eps * float(pair.abs().max()))
    return abs(float(pair[0] - pair[1])), noise


def _forwards(target: Target, pieces: Sequence[Sequence[int]], lengths: Collection[int]) -> dict[int, Tensor]:
    """Length of the text → (V,) logits there; each piece is one forward, and one ends at every length."""
    found = {}
    cache = target.new_cache(1, sum(map(len, pieces)))
    for piece in pieces:
        start = int(cache.lengths[0])
        ids = torch.tensor([list(piece)], device=target.device)
        positions = torch.arange(start, start + len(piece), device=target.device)[None]
        at = torch.tensor([[len(piece) - 1]], device=target.device)
        logits = target.forward(TargetInput(ids, positions, None, cache, [0], (), at)).logits[0, 0]
        if start + len(piece) in lengths:
            found[start + len(piece)] = logits.clone()
        commit(cache, torch.arange(len(piece))[None], [0])
    return found


def complaint(divergences: Sequence[dict[str, Any]], dtype: torch.dtype, exact: bool) -> str | None:
    """Describes the divergences that rounding does not explain, in one line; None if it explains all.

    Args:
        divergences: as `find_divergences` returns them.
        dtype: the target's. In float32 and float64 every divergence is wrong.
        exact: of the target; then every one is wrong. Elsewhere, in shorter dtypes, near-ties may part.
    """
    wrong = [d for d in divergences if exact or dtype.itemsize > 2 or not d["near_tie"]]
    if not wrong:
        return None
    first = wrong[0]
    return (
        f"{len(wrong)} outputs hold a token that plain decoding would not emit ({str(dtype).removeprefix('torch.')}); "
        f"the first: method {first['method']}, {first['task']} question {first['question']} turn {first['turn']}, "
        f"token {first['position']}: {first['method_token']} in place of {first['plain_token']}; their logits lie "
        f"{first['gap']} apart (kernels' noise {first['noise']:.3g})"
    )
