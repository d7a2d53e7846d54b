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
from aquiline.sampling import LossyRule, TokenChooser
from aquiline.stats import GenerationStats, Judged
from aquiline.targets.target import Feature, Target, TargetInput, TargetOutput
from aquiline.tree import DraftTree
from aquiline.verify import Acceptance, Ends, accept, accept_lossy, accept_sampled, endless, walk

PREFILL_CHUNK = 512
"""Prompt tokens per forward, to bound the memory of a prefill; the result equals a single pass."""


@dataclass(eq=False)
class Occupant:
    """The request in a slot.

    Attributes:
        tokens: prompt and output so far; the last one is the root, not yet in the cache.
        ends: receives each emitted token; True if it ends the output.
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
        occupants: by slot; None if it is free.
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
        tokens: accepted drafts, then the target's own token; at least one, unless the row failed.
        logits: (len(tokens), V) float32 target logits that each token was chosen from, if requested.
        sources: per token, what drafted it ("head", "lookup", …); the last one is the "target"'s own.
        error: raised by the choice of the token after `tokens`; the row can only be freed.
        judged: for each judged depth, what drafted there, and whether it was accepted.
    """

    slot: int
    tokens: list[int]
    logits: Tensor | None = None
    sources: Sequence[str] = ("target",)
    error: Exception | None = None
    judged: Sequence[Judged] = ()


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
) -> Iterator[StepResult | None]:
    """Runs the prompt `occupant.tokens` in a slot, chunk by chunk, and chooses its first token.

    The prefix that the slot already holds (a chat's earlier turns, a shared prefix) is not computed again, and logits
    only at the last position. Yields None after each chunk but the last, and then the result.
    """
    prompt, device, start = occupant.tokens, target.device, int(state.cache.lengths[slot])
    assert start < len(prompt), "at least the last prompt token must be forwarded"
    state.occupants[slot] = occupant
    features = drafter.needs.features if drafter else ()
    while start < len(prompt):
        stop = min(start + chunk, len(prompt))
        last = stop == len(prompt)
        with state.stats.timed("prefill"):
            at = torch.full((1, int(last)), stop - start - 1, device=device)
            ids, positions = torch.tensor([prompt[start:stop]], device=device), torch.arange(start, stop, device=device)
            out = target.forward(TargetInput(ids, positions[None], None, state.cache, [slot], features, at))
            commit(state.cache, torch.arange(stop - start)[None], [slot])
            if last:
                found = _first(occupant, out.logits[0, 0])
                occupant.tokens = prompt if found.error else [*prompt, found.next_token]
            text = occupant.tokens[: stop + 1]
            if drafter and len(text) > stop:
                rows = Rows([slot], [text], [occupant.chooser], generator=state.generator)
                drafter.extend(Committed(rows, out.features, [stop - start]), state.drafter_state)
        start = stop
        if not last:
            yield None
    yield StepResult(slot, occupant.tokens[start:], out.logits[0] if keep_logits else None, error=found.error)


def _first(occupant: Occupant, logits: Tensor) -> Acceptance:
    """Chooses the token after a prompt, where there is no tree to walk."""
    return walk(lambda node, taken: (None, occupant.chooser(logits, occupant.tokens)), occupant.ends)


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
        slots: occupied, distinct.
        max_depth: deepest useful draft given the remaining budgets.
        lossy: an acceptance rule that changes the output distribution.
    """
    occupants = [_occupant(state, slot) for slot in slots]
    rows = _rows(state, slots, occupants, max_depth)
    with state.stats.timed("draft"):
        tree = _propose(drafter, rows, state.drafter_state)
    with state.stats.timed("target"):
        out = _forward_tree(target, tree, state.cache, slots, drafter.needs.features if drafter else ())
    with state.stats.timed("accept"):
        accepted = _accept(tree, out, rows, [occupant.ends for occupant in occupants], lossy)
        emitted = _emitted(tree, accepted)
    _commit(target, drafter, state, rows, tree, out, accepted, emitted)
    names = trees.node_sources(tree, drafter.needs.source if drafter else "target")
    judged = _count(tree, names, occupants, accepted, lossy is not None and not lossy.exact)
    results = []
    for i, (slot, tokens, row) in enumerate(zip(slots, emitted, accepted, strict=True)):
        logits = out.logits[i, trees.index_on(target.device, *row.path)] if keep_logits else None
        sources = [*(names[i][node] for node in row.path[1:]), "target"][: len(tokens)]
        results.append(StepResult(slot, tokens, logits, sources, row.error, judged[i]))
    return results


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


def _rows(state: DecodeState, slots: Sequence[int], occupants: Sequence[Occupant], max_depth: int | None) -> Rows:
    texts, choosers = [occupant.tokens for occupant in occupants], [occupant.chooser for occupant in occupants]
    asked = [occupant.drafting for occupant in occupants]
    return Rows(slots, texts, choosers, max_depth, state.generator, () if all(wish.usual for wish in asked) else asked)


def _propose(drafter: Drafter | None, rows: Rows, drafter_state: Any) -> DraftTree:
    if rows.max_depth == 0:
        return trees.root_only(rows.roots)
    return trees.on_host(propose_as_asked(drafter, rows, drafter_state))


def _forward_tree(
    target: Target, tree: DraftTree, cache: KVCache, slots: Sequence[int], features: Sequence[Feature]
) -> TargetOutput:
    lengths = cache.lengths.tolist()
    # Drafts deeper than a row's own context, which other rows asked for, are never accepted.
    last = target.shape.max_positions - 1
    at = [
        [min(lengths[slot] + depth, last) for depth in trees.row_depths(row)]
        for slot, row in zip(slots, tree.parents.tolist(), strict=True)
    ]
    masks = [] if trees.is_chain(tree) else [trees.ancestors(tree.parents)]
    tokens, positions, *masks = trees.to_device(target.device, tree.tokens, torch.tensor(at), *masks)
    return target.forward(TargetInput(tokens, positions, masks[0] if masks else None, cache, slots, features))


def _accept(
    tree: DraftTree, out: TargetOutput, rows: Rows, ends: Sequence[Ends], lossy: LossyRule | None
) -> list[Acceptance]:
    if lossy is not None:
        return accept_lossy(tree, out.logits, rows.choosers, rows.texts, lossy, ends)
    if tree.draft_probs is not None:
        return accept_sampled(tree, out.logits, rows.choosers, rows.texts, rows.generator, ends)
    return accept(tree, out.logits, rows.choosers, rows.texts, ends, out.best)


def _emitted(tree: DraftTree, accepted: Sequence[Acceptance]) -> list[list[int]]:
    rows = zip(tree.tokens.tolist(), accepted, strict=True)
    return [[*(tokens[node] for node in row.path[1:]), row.next_token] if row.path else [] for tokens, row in rows]


def _commit(
    target: Target,
    drafter: Drafter | None,
    state: DecodeState,
    rows: Rows,
    tree: DraftTree,
    out: TargetOutput,
    accepted: Sequence[Acceptance],
    emitted: Sequence[Sequence[int]],
) -> None:
    """Advances the cache, the texts and the drafter by what was accepted."""
    paths, device = [row.path for row in accepted], target.device
    nodes = None
    with state.stats.timed("commit"):
        if drafter is not None and device.type != "cpu":
            width = max(1, *map(len, paths))
            padded = torch.tensor([[*path, *[-1] * (width - len(path))] for path in paths], dtype=torch.int64)
            nodes = trees.to_device(device, padded)[0]
        commit(state.cache, paths, rows.slots, nodes)
        for slot, new in zip(rows.slots, emitted, strict=True):
            _occupant(state, slot).tokens.extend(new)
    going = [i for i, row in enumerate(accepted) if row.error is None]
    if drafter is None or not going:
        return
    with state.stats.timed("extend"):
        features = None if out.features is None else trees.along(out.features, paths, nodes)
        committed = Committed(rows, features, [len(new) for new in emitted], tree, out.logits)
        drafter.extend(committed if len(going) == len(emitted) else committed.pick(going), state.drafter_state)


def _count(
    tree: DraftTree,
    names: Sequence[Sequence[str]],
    occupants: Sequence[Occupant],
    accepted: Sequence[Acceptance],
    lossy: bool,
) -> list[list[Judged]]:
    """Adds the step to the rows' counters; returns what was judged at each depth, by row."""
    parents, nodes = tree.parents.tolist(), tree.num_nodes.tolist()
    candidates = nodes if tree.num_candidates is None else tree.num_candidates.tolist()
    judged: list[list[Judged]] = []
    for i, (row, occupant) in enumerate(zip(accepted, occupants, strict=True)):
        judged.append([(names[i][node], True) for node in row.path[1:]])
        if not row.path:
            continue
        below = parents[i][: candidates[i]]
        # The children below the path were judged only if the row went on: an end leaves them undecided.
        if not row.ended and row.error is None and row.path[-1] in below:
            judged[i].append((names[i][below.index(row.path[-1])], False))
        occupant.stats.count_step(len(row.path) - 1, len(judged[i]), nodes[i] - 1)
        occupant.stats.lossy = occupant.stats.lossy or lossy
    return judged
