"""The loop: prefill and step, for any drafter and any number of rows.

One step: propose a tree, forward it through the target, accept, commit, extend the drafter.
Plain decoding is the same step with a root-only tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aquiline import tree as trees
from aquiline.cache import KVCache, commit, truncate
from aquiline.drafters.drafter import Drafter, ObservingDrafter, SamplingDrafter
from aquiline.sampling import TokenChooser
from aquiline.stats import GenerationStats
from aquiline.targets.target import Target, TargetOutput
from aquiline.tree import DraftTree
from aquiline.verify import Acceptance, LossyRule, accept, accept_lossy, accept_sampled

PREFILL_CHUNK = 512
"""Prompt tokens per forward: bounds the memory of a prefill, and equals one pass."""


@dataclass(eq=False)
class Row:
    """One request in its slot.

    Attributes:
        tokens: prompt and output so far; the last one is the root (not yet in the cache).
        chooser: how its tokens are chosen.
        stats: its counters.
    """

    tokens: list[int]
    chooser: TokenChooser
    stats: GenerationStats


@dataclass(eq=False)
class DecodeState:
    """Everything that changes while decoding.

    Between steps ``cache.lengths[r] == len(rows[r].tokens) - 1`` for every occupied slot.

    Attributes:
        cache: the target's keys and values.
        rows: slot → request, None where free.
        drafter_state: what the drafter's `new_state` returned, or None for plain decoding.
        stats: phase seconds of all rows together.
        generator: source of the draws of sampled drafts.
    """

    cache: KVCache
    rows: list[Row | None]
    drafter_state: Any
    stats: GenerationStats = field(default_factory=GenerationStats)
    generator: torch.Generator = field(default_factory=torch.Generator)


@dataclass(frozen=True, eq=False)
class StepResult:
    """What one row got out of one step.

    Attributes:
        row: the slot.
        tokens: emitted tokens, accepted drafts first; at least one.
        logits: (len(tokens), V) float32 target logits that each was chosen from, on request.
    """

    row: int
    tokens: list[int]
    logits: Tensor | None = None


def new_state(target: Target, drafter: Drafter | None, rows: int, capacity: int) -> DecodeState:
    """Allocates the state for `rows` slots of `capacity` positions."""
    return DecodeState(
        cache=target.new_cache(rows, capacity),
        rows=[None] * rows,
        drafter_state=drafter.new_state(rows, capacity) if drafter else None,
    )


def prefill(
    target: Target,
    drafter: Drafter | None,
    state: DecodeState,
    row: int,
    request: Row,
    *,
    keep_logits: bool = False,
    chunk: int = PREFILL_CHUNK,
) -> StepResult:
    """Runs the prompt of a request in slot `row` and chooses its first token.

    What the cache already holds of the prompt (a chat's earlier turns, a shared prefix) is not
    run again. Logits are computed for the last position only.

    Args:
        target: the target.
        drafter: the drafter or None.
        state: mutated.
        row: a slot; `state.cache.lengths[row]` tokens of the prompt are in it.
        request: the request; `tokens` is the prompt, at least one token.
        keep_logits: return the logits that the token was chosen from.
        chunk: tokens per forward.
    """
    pieces = prefill_chunks(target, drafter, state, row, request, keep_logits=keep_logits, chunk=chunk)
    return next(piece for piece in pieces if piece is not None)


def prefill_chunks(
    target: Target,
    drafter: Drafter | None,
    state: DecodeState,
    row: int,
    request: Row,
    *,
    keep_logits: bool = False,
    chunk: int = PREFILL_CHUNK,
) -> Iterator[StepResult | None]:
    """`prefill` as a generator: yields None after each chunk and the StepResult at the end."""
    prompt = request.tokens
    start = int(state.cache.lengths[row])
    assert start < len(prompt), "at least the last prompt token must be forwarded"
    state.rows[row] = request
    features = drafter.features if drafter else ()
    while start < len(prompt):
        stop = min(start + chunk, len(prompt))
        last = stop == len(prompt)
        with state.stats.timed("prefill"):
            out = _forward_chunk(target, state, row, prompt[start:stop], start, features, last)
            if last:
                token = request.chooser(out.logits[0, 0], prompt)
                request.tokens = [*prompt, token]
            if drafter:
                shifted = torch.tensor([request.tokens[start + 1 : stop + 1]], device=target.device)
                drafter.extend(
                    shifted,
                    out.features,
                    [stop - start],
                    [request.tokens[: stop + 1]],
                    [row],
                    state.drafter_state,
                )
        start = stop
        if last:
            yield StepResult(row, [token], out.logits[0] if keep_logits else None)
        else:
            yield None


def _forward_chunk(
    target: Target,
    state: DecodeState,
    row: int,
    tokens: Sequence[int],
    start: int,
    features: Sequence[int | str],
    last: bool,
) -> TargetOutput:
    width = len(tokens)
    device = target.device
    at = torch.full((1, 1), width - 1, device=device) if last else torch.empty(1, 0, dtype=torch.int64, device=device)
    ids = torch.tensor([list(tokens)], device=device)
    positions = torch.arange(start, start + width, device=device)[None]
    out = target.forward(ids, positions, None, state.cache, [row], features, at)
    commit(state.cache, torch.arange(width)[None], [row])
    return out


def step(
    target: Target,
    drafter: Drafter | None,
    state: DecodeState,
    rows: Sequence[int],
    *,
    max_depth: int | None = None,
    keep_logits: bool = False,
    lossy: LossyRule | None = None,
) -> list[StepResult]:
    """Emits at least one token for each of `rows`, all in one target forward.

    Args:
        target: the target.
        drafter: the drafter, or None for plain decoding.
        state: mutated.
        rows: occupied slots, distinct.
        max_depth: deepest draft worth making, from the remaining budgets.
        keep_logits: return the logits that each token was chosen from.
        lossy: an acceptance rule that changes the output distribution.
    """
    stats, requests = state.stats, [_occupied(state, row) for row in rows]
    root = torch.tensor([request.tokens[-1] for request in requests], device=target.device)
    with stats.timed("draft"):
        tree = _propose(drafter, root, requests, rows, state, max_depth)
    with stats.timed("target"):
        out = _forward_tree(target, tree, state.cache, rows, drafter.features if drafter else ())
    with stats.timed("accept"):
        acceptance = _accept(tree, out.logits, requests, state.generator, lossy)
        paths = [[node for node in path if node >= 0] for path in acceptance.path.tolist()]
        emitted = _emitted(tree, paths, acceptance)
    with stats.timed("commit"):
        commit(state.cache, acceptance.path, rows)
        for request, tokens in zip(requests, emitted, strict=True):
            request.tokens.extend(tokens)
    if drafter is not None:
        with stats.timed("extend"):
            if isinstance(drafter, ObservingDrafter):
                drafter.observe(tree, out.logits, rows, state.drafter_state)
            _extend(drafter, out, acceptance, emitted, requests, rows, state.drafter_state)
    _count(tree, paths, requests, lossy is not None and not lossy.exact)
    return [
        StepResult(row, tokens, out.logits[i, path] if keep_logits else None)
        for i, (row, tokens, path) in enumerate(zip(rows, emitted, paths, strict=True))
    ]


def free(drafter: Drafter | None, state: DecodeState, row: int) -> None:
    """Empties a slot."""
    state.rows[row] = None
    truncate(state.cache, row, 0)
    if drafter is not None:
        drafter.reset(row, 0, state.drafter_state)


def _occupied(state: DecodeState, row: int) -> Row:
    request = state.rows[row]
    assert request is not None, f"slot {row} is free"
    return request


def _propose(
    drafter: Drafter | None,
    root: Tensor,
    requests: Sequence[Row],
    rows: Sequence[int],
    state: DecodeState,
    max_depth: int | None,
) -> DraftTree:
    if drafter is None or max_depth == 0:
        return trees.root_only(root)
    prefixes = [request.tokens for request in requests]
    choosers = [request.chooser for request in requests]
    samples = any(chooser.params.temperature > 0 for chooser in choosers)
    if samples and isinstance(drafter, SamplingDrafter) and drafter.sampled:
        return drafter.propose_sampled(root, prefixes, rows, state.drafter_state, choosers, state.generator, max_depth)
    return drafter.propose(root, prefixes, rows, state.drafter_state, max_depth)


def _forward_tree(
    target: Target, tree: DraftTree, cache: KVCache, rows: Sequence[int], features: Sequence[int | str]
) -> TargetOutput:
    lengths = cache.lengths[list(rows)].to(tree.tokens.device)
    if trees.is_chain(tree):
        offsets = torch.arange(tree.size, device=tree.tokens.device)
        return target.forward(tree.tokens, lengths[:, None] + offsets, None, cache, rows, features)
    positions = lengths[:, None] + trees.depths(tree.parents)
    return target.forward(tree.tokens, positions, trees.ancestors(tree.parents), cache, rows, features)


def _accept(
    tree: DraftTree,
    logits: Tensor,
    requests: Sequence[Row],
    generator: torch.Generator,
    lossy: LossyRule | None,
) -> Acceptance:
    choosers = [request.chooser for request in requests]
    prefixes = [request.tokens for request in requests]
    if lossy is not None:
        return accept_lossy(tree, logits, choosers, prefixes, lossy)
    if tree.draft_probs is not None:
        return accept_sampled(tree, logits, choosers, prefixes, generator)
    return accept(tree, logits, choosers, prefixes)


def _emitted(tree: DraftTree, paths: Sequence[Sequence[int]], acceptance: Acceptance) -> list[list[int]]:
    tokens, following = tree.tokens.tolist(), acceptance.next_token.tolist()
    return [[*(tokens[i][node] for node in path[1:]), following[i]] for i, path in enumerate(paths)]


def _extend(
    drafter: Drafter,
    out: TargetOutput,
    acceptance: Acceptance,
    emitted: Sequence[Sequence[int]],
    requests: Sequence[Row],
    rows: Sequence[int],
    drafter_state: Any,
) -> None:
    """Gives the drafter the committed positions: the feature at each path node, the token after it."""
    width = acceptance.path.shape[1]
    device = acceptance.next_token.device
    tokens = torch.tensor([[*t, *[0] * (width - len(t))] for t in emitted], device=device)
    features = None
    if out.features is not None:
        index = acceptance.path.clamp(min=0).to(device)
        features = out.features.gather(1, index[:, :, None].expand(-1, -1, out.features.shape[-1]))
    prefixes = [request.tokens for request in requests]
    drafter.extend(tokens, features, [len(t) for t in emitted], prefixes, rows, drafter_state)


def _count(tree: DraftTree, paths: Sequence[Sequence[int]], requests: Sequence[Row], lossy: bool) -> None:
    parents, nodes = tree.parents.tolist(), tree.num_nodes.tolist()
    candidates = nodes if tree.num_candidates is None else tree.num_candidates.tolist()
    for i, (path, request) in enumerate(zip(paths, requests, strict=True)):
        offered = len(path) - 1 + (path[-1] in parents[i][: candidates[i]])
        request.stats.count_step(len(path) - 1, offered, nodes[i] - 1)
        request.stats.lossy = request.stats.lossy or lossy
