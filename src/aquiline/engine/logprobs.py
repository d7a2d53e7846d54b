"""Computes log-probabilities of emitted tokens and of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from aquiline.cache import commit
from aquiline.engine.request import Engine
from aquiline.targets.target import TargetInput

_CHUNK = 64
"""Prompt tokens per forward: each position has a row of logits over the vocabulary."""


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


def prompt_logprobs(
    engine: Engine, tokens: Sequence[int], top: int
) -> Iterator[tuple[list[float], list[dict[int, float]]] | None]:
    """Computes log-probabilities of a prompt's tokens, in a cache of its own.

    Args:
        tokens: S ≥ 1 prompt tokens that fit the context.
        top: alternatives to report, ≥ 0.

    Yields:
        None after each chunk, so that a server can step other requests in between; at the end, for
        tokens 1 … S − 1 what `token_logprobs` returns. The first token has no probability.
    """
    target, chosen, best = engine.target, list[float](), list[dict[int, float]]()
    with engine.lock, torch.inference_mode():
        cache = target.new_cache(1, len(tokens))
    for start in range(0, len(tokens) - 1, _CHUNK):
        stop = min(start + _CHUNK, len(tokens) - 1)
        with engine.lock, torch.inference_mode():
            ids = torch.tensor([list(tokens[start:stop])], device=target.device)
            positions = torch.arange(start, stop, device=target.device)[None]
            logits = target.forward(TargetInput(ids, positions, None, cache, [0])).logits[0]
            commit(cache, torch.arange(stop - start)[None], [0])
            scores, alternatives = token_logprobs(logits, tokens[start + 1 : stop + 1], top)
        chosen += scores
        best += alternatives
        yield None
    yield chosen, best
