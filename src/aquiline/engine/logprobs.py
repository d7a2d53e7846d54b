"""Log-probabilities of emitted tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> tuple[list[float], list[dict[int, float]]]:
    """Computes log-probabilities before temperature and processors.

    Args:
        logits: (≥ T, V) target logits; token i was chosen from row i.
        tokens: T emitted tokens.
        top: alternatives to report, ≥ 0.

    Returns:
        T log-probabilities in nats, and per token the `top` likeliest ids with theirs, in descending order.
    """
    scores = logits[: len(tokens)].float().log_softmax(-1)
    index = torch.tensor(list(tokens), device=scores.device)[:, None]
    chosen: list[float] = scores.gather(1, index)[:, 0].tolist()
    values, ids = scores.topk(min(top, scores.shape[-1]), dim=-1)
    best = [dict(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return chosen, best
