"""The decoding loop: prefill and step, for any drafter and any number of rows.

A step proposes a tree, runs it through the target, accepts, commits, and extends the drafter.
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
from aquiline.drafters.drafter import Committed, Drafter, Drafting, Rows
from aquiline.drafters.requested import propose_as_asked
from aquiline.sampling import TokenChooser
from aquiline.stats import GenerationStats
from aquiline.targets.target import Feature, Target, TargetInput, TargetOutput
from aquiline.tree import DraftTree
from aquiline.verify import Acceptance, Ends, LossyRule, Walk, accept, accept_lossy, accept_sampled, endless, walk

PREFILL_CHUNK = 512
"""Prompt tokens per forward, to bound the memory of a prefill; the result equals a single pass."""


@dataclass(eq=False)
class Occupant:
    """The request in a slot.

    Attributes:
        tokens: prompt and output so far; the last one is the root, not yet in the cache.
        chooser: chooses the target's tokens.
        stats: counters of the request.
        drafting: what the request asks of the drafts.
        ends: receives each emitted token, and says which one ends the output.
    """

    tokens: list[int]
    chooser: TokenChooser
    stats: GenerationStats
    drafting: Drafting = field(default_factory=Drafting)
    ends: Ends = endless


@dataclass(eq=False)
class DecodeState:
    """The mutable state of decoding.

    Between steps ``cache.lengths[s] == len(occupants[s].tokens) - 1`` for every occupied slot s.

    Attributes:
        cache: the target's keys and values.
        occupants: slot → occupant, or None if free.
        drafter_state: the result of the drafter's `new_state`, or None for plain decoding.
        stats: seconds per phase, over all rows.
        generator: source of randomness for sampled drafts and their verification.
    """

    cache: KVCache
    occupants: list[Occupant | None]
    drafter_state: Any
    stats: GenerationStats = field(default_factory=GenerationStats)
    generator: torch.Generator = field(default_factory=torch.Generator)


@dataclass(frozen=True, eq=False)
class StepResult:
    """The tokens that a step emitted for one row.

    Attributes:
        slot: the row's slot.
        tokens: accepted drafts, then the target's own token; at least one, unless the row failed.
        logits: (len(tokens), V) float32 target logits that each token was chosen from, if requested.
        sources: per token, what drafted it ("head", "lookup", …); the last one is the "target"'s own.
        error: raised by the choice of the token after `tokens`; the row can only be freed.
    """

    slot: int
    tokens: list[int]
    logits: Tensor | None = None
    sources: Sequence[str] = ("target",)
    error: Exception | None = None


def new_state(target: Target, drafter: Drafter | None, slots: int, capacity: int) -> DecodeState:
    """Allocates the state for `slots` slots of `capacity` positions."""
    return DecodeState(
        cache=target.new_cache(slots, capacity),
        occupants=[None] * slots,
        drafter_state=drafter.new_state(slots, capacity) if drafter else None,
    )


def prefill(
    target: Target,
    drafter: Drafter | None,
    state: DecodeState,
    slot: int,
    occupant: Occupant,
    *,
    keep_logits: bool = False,
    chunk: int = PREFILL_CHUNK,
) -> StepResult:
    """Runs a prompt in a slot and chooses its first token.

    The part of the prompt that the cache already holds (a chat's earlier turns, a shared prefix) is not
    computed again. Logits are computed only for the last position.

    Args:
        target: the target.
        drafter: the drafter or None.
        state: mutated.
        slot: its first `state.cache.lengths[slot]` positions hold a prefix of the prompt.
        occupant: its `tokens` are the prompt, at least one.
        keep_logits: return the logits that the token was chosen from.
        chunk: tokens per forward.
    """
    pieces = prefill_chunks(target, drafter, state, slot, occupant, keep_logits=keep_logits, chunk=chunk)
    return next(piece for piece in pieces if piece is not None)


def prefill_chunks(
    target: Target,
    drafter: Drafter | None,
    state: DecodeState,
    slot: int,
    occupant: Occupant,
    *,
    keep_logits: bool = False,
    chunk: int = PREFILL_CHUNK,
) -> Iterator[StepResult | None]:
    """`prefill` as a generator: yields None after each chunk and the StepResult at the end."""
    prompt = occupant.tokens
    start = int(state.cache.lengths[slot])
    assert start < len(prompt), "at least the last prompt token must be forwarded"
    state.occupants[slot] = occupant
    features = drafter.needs.features if drafter else ()
    while start < len(prompt):
        stop = min(start + chunk, len(prompt))
        last = stop == len(prompt)
        with state.stats.timed("prefill"):
            out = _forward_chunk(target, state, slot, prompt[start:stop], start, features, last)
            if last:
                found = _first(occupant, out.logits[0, 0])
                occupant.tokens = prompt if found.error else [*prompt, found.next_token]
            if drafter and len(occupant.tokens) > stop:
                text = occupant.tokens[: stop + 1]
                rows = Rows([slot], [text], [occupant.chooser], generator=state.generator)
                shifted = torch.tensor([text[start + 1 :]], dtype=torch.int64, device=target.device)
                drafter.extend(Committed(rows, shifted, out.features, [stop - start]), state.drafter_state)
        start = stop
        if last:
            yield StepResult(slot, occupant.tokens[stop:], out.logits[0] if keep_logits else None, error=found.error)
        else:
            yield None


def _first(occupant: Occupant, logits: Tensor) -> Walk:
    """Chooses the token after a prompt, where there is no tree to walk."""
    return walk(lambda node, taken: (None, occupant.chooser(logits, occupant.tokens)), occupant.ends)


def _forward_chunk(
    target: Target,
    state: DecodeState,
    slot: int,
    tokens: Sequence[int],
    start: int,
    features: Sequence[Feature],
    last: bool,
) -> TargetOutput:
    width = len(tokens)
    device = target.device
    at = torch.full((1, 1), width - 1, device=device) if last else torch.empty(1, 0, dtype=torch.int64, device=device)
    ids = torch.tensor([list(tokens)], device=device)
    positions = torch.arange(start, start + width, device=device)[None]
    out = target.forward(TargetInput(ids, positions, None, state.cache, [slot], features, at))
    commit(state.cache, torch.arange(width)[None], [slot])
    return out


def step(
    target: Target,
    drafter: Drafter | None,
    state: DecodeState,
    slots: Sequence[int],
    *,
    max_depth: int | None = None,
    keep_logits: bool = False,
    lossy: LossyRule | None = None,
) -> list[StepResult]:
    """Emits at least one token for each of `slots`, all in one target forward.

    A row whose own chooser raises does not affect the others; its result holds the error.

    Args:
        target: the target.
        drafter: the drafter, or None for plain decoding.
        state: mutated.
        slots: occupied, distinct.
        max_depth: deepest useful draft given the remaining budgets.
        keep_logits: return the logits that each token was chosen from.
        lossy: an acceptance rule that changes the output distribution.
    """
    stats, occupants = state.stats, [_occupant(state, slot) for slot in slots]
    texts, choosers = [occupant.tokens for occupant in occupants], [occupant.chooser for occupant in occupants]
    asked = [occupant.drafting for occupant in occupants]
    rows = Rows(slots, texts, choosers, max_depth, state.generator, () if all(wish.usual for wish in asked) else asked)
    with stats.timed("draft"):
        tree = _propose(drafter, rows, state.drafter_state)
    with stats.timed("target"):
        out = _forward_tree(target, tree, state.cache, slots, drafter.needs.features if drafter else ())
    with stats.timed("accept"):
        acceptance = _accept(tree, out.logits, rows, [occupant.ends for occupant in occupants], lossy)
        paths = [[node for node in path if node >= 0] for path in acceptance.path.tolist()]
        emitted = _emitted(tree, paths, acceptance)
    with stats.timed("commit"):
        nodes, following = _uploaded(target, acceptance, emitted) if drafter else (None, None)
        commit(state.cache, acceptance.path, slots, nodes)
        for text, new in zip(texts, emitted, strict=True):
            text.extend(new)
    going = [i for i, error in enumerate(acceptance.errors) if error is None]
    if drafter is not None and nodes is not None and following is not None and going:
        with stats.timed("extend"):
            features = None if out.features is None else _at_path(out.features, nodes)
            counts = [len(new) for new in emitted]
            committed = Committed(rows, following, features, counts, tree, out.logits)
            drafter.extend(committed if len(going) == len(slots) else committed.pick(going), state.drafter_state)
    _count(tree, paths, occupants, acceptance, lossy is not None and not lossy.exact)
    names = trees.node_sources(tree, drafter.needs.source if drafter else "target")
    return [
        StepResult(
            slot,
            tokens,
            out.logits[i, trees.index_on(target.device, *path)] if keep_logits else None,
            [*(names[i][node] for node in path[1:]), "target"][: len(tokens)],
            acceptance.errors[i],
        )
        for i, (slot, tokens, path) in enumerate(zip(slots, emitted, paths, strict=True))
    ]


def free(drafter: Drafter | None, state: DecodeState, slot: int) -> None:
    """Empties a slot."""
    state.occupants[slot] = None
    truncate(state.cache, slot, 0)
    if drafter is not None:
        drafter.reset(slot, 0, state.drafter_state)


def _occupant(state: DecodeState, slot: int) -> Occupant:
    occupant = state.occupants[slot]
    assert occupant is not None, f"slot {slot} is free"
    return occupant


def _propose(drafter: Drafter | None, rows: Rows, drafter_state: Any) -> DraftTree:
    if rows.max_depth == 0:
        return trees.root_only(rows.roots)
    return trees.on_host(propose_as_asked(drafter, rows, drafter_state))


def _forward_tree(
    target: Target, tree: DraftTree, cache: KVCache, slots: Sequence[int], features: Sequence[Feature]
) -> TargetOutput:
    lengths = cache.lengths[list(slots)][:, None]
    # Drafts deeper than a row's own context, which other rows asked for, are never accepted.
    last = target.shape.max_positions - 1
    if trees.is_chain(tree):
        positions = (lengths + torch.arange(tree.size)).clamp(max=last)
        tokens, positions = trees.to_device(target.device, tree.tokens, positions)
        return target.forward(TargetInput(tokens, positions, None, cache, slots, features))
    positions, ancestors = (lengths + trees.depths(tree.parents)).clamp(max=last), trees.ancestors(tree.parents)
    tokens, positions, ancestors = trees.to_device(target.device, tree.tokens, positions, ancestors)
    return target.forward(TargetInput(tokens, positions, ancestors, cache, slots, features))


def _accept(tree: DraftTree, logits: Tensor, rows: Rows, ends: Sequence[Ends], lossy: LossyRule | None) -> Acceptance:
    if lossy is not None:
        return accept_lossy(tree, logits, rows.choosers, rows.texts, lossy, ends)
    if tree.draft_probs is not None:
        return accept_sampled(tree, logits, rows.choosers, rows.texts, rows.generator, ends)
    return accept(tree, logits, rows.choosers, rows.texts, ends)


def _emitted(tree: DraftTree, paths: Sequence[Sequence[int]], acceptance: Acceptance) -> list[list[int]]:
    tokens, following = tree.tokens.tolist(), acceptance.next_token.tolist()
    return [[*(tokens[i][node] for node in path[1:]), following[i]] if path else [] for i, path in enumerate(paths)]


def _uploaded(target: Target, acceptance: Acceptance, emitted: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Returns the accepted path and the emitted tokens, both (B, A) int64 and padded, on the target's device."""
    width = acceptance.path.shape[1]
    tokens = torch.tensor([[*new, *[0] * (width - len(new))] for new in emitted], dtype=torch.int64)
    nodes, following = trees.to_device(target.device, acceptance.path, tokens)
    return nodes, following


def _at_path(features: Tensor, path: Tensor) -> Tensor:
    """The features (B, N, F) at the nodes of the path, (B, A, F)."""
    return features.gather(1, path.clamp(min=0)[:, :, None].expand(-1, -1, features.shape[-1]))


def _count(
    tree: DraftTree,
    paths: Sequence[Sequence[int]],
    occupants: Sequence[Occupant],
    acceptance: Acceptance,
    lossy: bool,
) -> None:
    parents, nodes = tree.parents.tolist(), tree.num_nodes.tolist()
    candidates = nodes if tree.num_candidates is None else tree.num_candidates.tolist()
    for i, (path, occupant) in enumerate(zip(paths, occupants, strict=True)):
        if not path:
            continue
        # The children below the path were judged only if the row went on: an end leaves them undecided.
        decided = not acceptance.ended[i] and acceptance.errors[i] is None
        offered = len(path) - 1 + (decided and path[-1] in parents[i][: candidates[i]])
        occupant.stats.count_step(len(path) - 1, offered, nodes[i] - 1)
        occupant.stats.lossy = occupant.stats.lossy or lossy
