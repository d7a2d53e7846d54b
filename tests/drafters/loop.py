"""The bare loop over tiny models: what a drafter emits, and what plain decoding emits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aquiline import decode
from aquiline.drafters.drafter import Committed, Drafter, Rows
from aquiline.sampling import LossyRule, SamplingParams
from aquiline.stats import GenerationStats
from aquiline.targets.target import Target
from aquiline.tree import DraftTree
from tests import tiny
from tests.tree_invariants import validate


def run(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[list[int]],
    budgets: Sequence[int],
    params: SamplingParams | None = None,
    *,
    seeds: Sequence[int] | None = None,
    lossy: LossyRule | None = None,
    generator_seed: int = 0,
    mixed: Sequence[SamplingParams] | None = None,
) -> tuple[list[list[int]], GenerationStats]:
    """Emits `budgets[i]` tokens after `prompts[i]`; rows leave as they finish. Trees are validated."""
    state = decode.new_state(target, drafter, len(prompts), 64)
    state.generator.manual_seed(generator_seed)
    total = GenerationStats()
    out: list[list[int]] = []
    for row, prompt in enumerate(prompts):
        chooser = tiny.chooser(prompt, (mixed[row] if mixed else params), seeds[row] if seeds else row)
        request = decode.Occupant(list(prompt), chooser, total)
        list(decode.prefill(target, drafter, state, row, request, chunk=7))
        out.append(request.tokens[-1:])
    while True:
        rows = [row for row in range(len(prompts)) if len(out[row]) < budgets[row]]
        if not rows:
            break
        depth = max(budgets[row] - len(out[row]) for row in rows)
        for result in decode.step(target, drafter, state, rows, max_depth=depth, lossy=lossy):
            out[result.slot] += result.tokens
            if len(out[result.slot]) >= budgets[result.slot]:
                decode.free(drafter, state, result.slot)
    return [tokens[:budget] for tokens, budget in zip(out, budgets, strict=True)], total


def assert_equal_to_plain(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    budget: int = 40,
) -> GenerationStats:
    """Equal token for token, with acceptances and rejections both happening; the counters."""
    budgets = [budget - 5 * row for row in range(len(prompts))]
    expected, _ = run(target, None, prompts, budgets, params)
    found, stats = run(target, drafter, prompts, budgets, params)
    assert found == expected
    assert stats.accepted > 0, "no draft was accepted"
    offered, accepted = sum(stats.offered_at), sum(stats.accepted_at)
    assert accepted < offered, "no draft was refused"
    return stats


class Validating:
    """Checks every tree that a drafter proposes, and keeps it."""

    def __init__(self, drafter: Drafter) -> None:
        self.inner, self.needs = drafter, drafter.needs
        self.seen: list[DraftTree] = []

    def new_state(self, slots: int, capacity: int) -> Any:
        return self.inner.new_state(slots, capacity)

    def propose(self, rows: Rows, state: Any) -> DraftTree:
        self.seen.append(self.inner.propose(rows, state))
        validate(self.seen[-1])
        return self.seen[-1]

    def extend(self, committed: Committed, state: Any) -> None:
        self.inner.extend(committed, state)

    def copy(self, source: int, slot: int, length: int, state: Any) -> None:
        self.inner.copy(source, slot, length, state)

    def reset(self, slot: int, length: int, state: Any) -> None:
        self.inner.reset(slot, length, state)


def rows_of(*texts: Sequence[int], slots: Sequence[int] | None = None, max_depth: int | None = None) -> Rows:
    """Greedy rows with these texts, in slots 0, 1, … unless given."""
    return Rows(
        list(slots if slots is not None else range(len(texts))),
        texts,
        [tiny.chooser(list(text)) for text in texts],
        max_depth,
    )


def extend(drafter: Drafter, state: Any, slot: int, text: Sequence[int], features: Tensor | None = None) -> None:
    """Commits the last tokens of a text: as many as there are features, or all but the first."""
    count = len(text) - 1 if features is None else features.shape[1]
    drafter.extend(Committed(rows_of(text, slots=[slot]), features, [count]), state)


def tiny_target(vocab: int, *, seed: int = 0, scale: float = 0.3, layers: int = 7):
    """A decoder with a vocabulary of a few tokens."""
    from aquiline.targets.decoder import Decoder

    config = replace(
        tiny.decoder("llama").config,
        vocab_size=vocab,
        num_layers=layers,
        windows=(None,) * layers,
        rotary=(True,) * layers,
    )
    torch.manual_seed(seed)
    model = Decoder(config).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=scale)
    return model


def noisy(model, amount: float, *, seed: int = 1):
    """A copy of a decoder with noise on its matrices: often right, not always."""
    from aquiline.targets.decoder import Decoder

    copy = Decoder(model.config).to(model.dtype).eval().requires_grad_(False)
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for parameter in copy.parameters():
        if parameter.dim() > 1:
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise, alpha=amount)
    return copy
