"""Checks every output against plain decoding, and judges where they part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from aquiline.bench.metrics import common_length
from aquiline.bench.records import Record
from aquiline.cache import commit
from aquiline.decode import PREFILL_CHUNK
from aquiline.targets.target import Target

EXACT = (torch.float32, torch.float64)
"""In these dtypes a token that differs from plain decoding's is wrong, whatever its margin."""


class WrongTokens(RuntimeError):
    """A method emitted tokens that the target would not: a bug in the method or the engine."""


@dataclass(frozen=True)
class Divergence:
    """Where an output of a method leaves plain decoding's, at temperature 0.

    Attributes:
        method: label.
        task: of the question.
        question: its id.
        turn: from 0.
        batch: rows decoded together.
        position: index of the first differing token.
        plain_token: what plain decoding emitted, -1 if it had ended.
        method_token: what the method emitted, -1 if it had ended.
        gap: distance of the two tokens' logits in forwards of one token, as plain decoding makes
            them; None if one of the outputs had ended.
        noise: largest difference over the vocabulary between those logits and the ones that one
            forward over the whole text gives: what the kernels' rounding amounts to here. Of 16-bit
            logits at least the distance of neighbouring numbers: on the packed path, both forwards
            have the same bits, and the branches of a tree, which sum in another order, have not.
        near_tie: gap ≤ 2 · noise, so that rounding alone can exchange the two.
    """

    method: str
    task: str
    question: str
    turn: int
    batch: int
    position: int
    plain_token: int
    method_token: int
    gap: float | None
    noise: float
    near_tie: bool


def find_divergences(
    target: Target, record: Record, plain: Record, prompts: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Compares the rows of a record with plain decoding's; one JSON-able entry per differing row."""
    found = []
    rows = zip(record.questions, record.outputs, plain.outputs, prompts, strict=True)
    for question, mine, reference, prompt in rows:
        at = common_length(mine, reference)
        if mine == reference:
            continue
        tokens = [row[at] if at < len(row) else -1 for row in (reference, mine)]
        gap, noise = _margin(target, [*prompt, *reference[:at]], len(prompt), tokens)
        found.append(
            Divergence(
                record.method, record.task, question, record.turn, record.batch,
                at, tokens[0], tokens[1], gap, noise, gap is not None and gap <= 2 * noise,
            )
        )  # fmt: skip
    return [asdict(divergence) for divergence in found]


@torch.inference_mode()
def _margin(
    target: Target, text: Sequence[int], prompt_length: int, tokens: Sequence[int]
) -> tuple[float | None, float]:
    """The gap between two tokens' logits after `text`, and the kernels' noise in these logits."""
    prompt = text[:prompt_length]
    pieces = [prompt[i : i + PREFILL_CHUNK] for i in range(0, prompt_length, PREFILL_CHUNK)]
    single = _last_logits(target, [*pieces, *([token] for token in text[prompt_length:])])
    whole = _last_logits(target, [text])
    noise = float((single - whole).abs().max())
    if min(tokens) < 0:
        return None, noise
    pair = single[list(tokens)]
    if target.dtype.itemsize == 2:
        noise = max(noise, torch.finfo(target.dtype).eps * float(pair.abs().max()))
    return abs(float(pair[0] - pair[1])), noise


def _last_logits(target: Target, pieces: Sequence[Sequence[int]]) -> Tensor:
    """(V,) logits after the pieces, each one forward."""
    cache = target.new_cache(1, sum(map(len, pieces)))
    logits = torch.empty(0)
    for piece in pieces:
        start = int(cache.lengths[0])
        ids = torch.tensor([list(piece)], device=target.device)
        positions = torch.arange(start, start + len(piece), device=target.device)[None]
        at = torch.tensor([[len(piece) - 1]], device=target.device)
        logits = target.forward(ids, positions, None, cache, [0], (), at).logits[0, 0].clone()
        commit(cache, torch.arange(len(piece))[None], [0])
    return logits


def complaint(divergences: Sequence[dict[str, Any]], dtype: torch.dtype) -> str | None:
    """What is wrong with the divergences, in one line; None if rounding explains all of them.

    In float32 and float64 every one is wrong. In shorter dtypes those are that are no near-ties.
    """
    wrong = [d for d in divergences if dtype in EXACT or not d["near_tie"]]
    if not wrong:
        return None
    first = wrong[0]
    return (
        f"{len(wrong)} outputs hold a token that plain decoding would not emit ({str(dtype).removeprefix('torch.')}); "
        f"the first: method {first['method']}, {first['task']} question {first['question']} turn {first['turn']}, "
        f"token {first['position']}: {first['method_token']} in place of {first['plain_token']}; their logits lie "
        f"{first['gap']} apart (kernels' noise {first['noise']:.3g})"
    )
