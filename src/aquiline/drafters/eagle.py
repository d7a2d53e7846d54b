"""EAGLE-1, EAGLE-2 and EAGLE-3 as drafters: a draft network times a tree policy."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import embedding

from aquiline import tree as trees
from aquiline.cache import KVCache
from aquiline.drafters.coupled import Coupling
from aquiline.drafters.drafter import Committed, Needs, Rows
from aquiline.drafters.eagle_network import (
    DraftHead,
    EagleNetwork,
    Network,
    forward_network,
    head_on,
    new_draft_cache,
)
from aquiline.drafters.eagle_state import EagleState, copy_slot, forget, keep, padded
from aquiline.drafters.filling import Pool, fill_tree, parents_of, with_siblings
from aquiline.drafters.levels import Level, first_level
from aquiline.drafters.native import NativeNetwork, native_draft, native_network
from aquiline.drafters.prices import Prices
from aquiline.drafters.sampled import DrawnCandidates, check_ranks
from aquiline.drafters.trees import Chain, DynamicTree, TreePolicy, paths_of
from aquiline.native.codes import WeightFormat
from aquiline.native.draft import Growth, NativeDraft
from aquiline.native.library import MOST_KEPT
from aquiline.targets.layers import Attention, GatedMLP
from aquiline.targets.packed import packed as packed_copy
from aquiline.targets.rope import RotaryTable
from aquiline.targets.target import Target
from aquiline.tree import DraftTree

MOST_LEVELS, SIBLINGS = 10, 4
"""Under prices: deepest draft, and candidates of a level."""

LEAST = 0.02
"""Candidates less likely than this are not considered: no node has cost so little."""


class EagleDrafter:
    """Drafts with an EAGLE head; coupled with the target's draws where a row samples.

    Keys and values of accepted tokens are always computed from the target's features: those written
    while drafting lie beyond the committed length and are overwritten.

    Args:
        head: the draft head; its network moves to the target's device.
        target: provides embeddings, and for EAGLE-1/2 the LM head.
        sampled: for rows that sample, draw children instead of taking the likeliest (EAGLE-1's
            Algorithm 1); needs a chain or a static tree. The output then equals plain decoding in
            distribution, not token for token.
        packed: draft with a fast form of the network: on a CPU a copy, if the machine supports it; elsewhere
            joined projections. Not for a network whose weights still change.
        form: quantises the copy's weights; with `packed` on the CPU kernels.
    """

    def __init__(
        self,
        head: DraftHead,
        target: Target,
        policy: TreePolicy,
        *,
        sampled: bool = False,
        packed: bool = False,
        form: WeightFormat | None = None,
    ) -> None:
        if sampled:
            check_ranks(policy)
        self.head = head = head_on(head, target.device)
        self.target, self.policy = target, policy
        self.needs = Needs(features=head.config.features, samples=sampled)
        self._coupling = Coupling(head.draft_to_target, head.gamma)
        weight = head.network.fc.weight
        self._rotary = RotaryTable(head.config.layer.rope, weight.dtype, weight.device)
        fast = (native_network(head.network, form=form) or packed_copy(head.network)) if packed else None
        self._network: Network | NativeNetwork = fast or head.network
        if packed and weight.device.type != "cpu":
            for module in head.network.modules():
                if isinstance(module, Attention | GatedMLP):
                    module.join()
        self._paces: dict[bool, deque[float]] = {sample: deque(maxlen=15) for sample in (False, True)}
        self._draft = native_draft(self._network, target, head.embedding, head.draft_to_target)

    def become(self, other: EagleDrafter) -> None:
        """Drafts with the head of `other` from the next step on; states stay valid, cached keys are the old head's."""
        mine, theirs = self.head, other.head
        if mine.config != theirs.config or not _equal(mine.draft_to_target, theirs.draft_to_target):
            raise ValueError("the heads differ in their sizes or their vocabulary; load the model with the new one")
        self.head, self._coupling, self._network, self._draft = theirs, other._coupling, other._network, other._draft

    def new_state(self, slots: int, capacity: int) -> EagleState:
        network, config = self.head.network, self.head.config
        weight = network.fc.weight
        return EagleState(
            cache=new_draft_cache(network, slots, capacity, self.target.shape.max_positions),
            hidden=torch.zeros(slots, config.hidden_size, dtype=weight.dtype, device=weight.device),
            logits=torch.zeros(slots, config.draft_vocab_size, device=weight.device),
            pending=[[] for _ in range(slots)],
            forgotten=[0] * slots,
        )

    def extend(self, committed: Committed, state: EagleState) -> None:
        """Keeps the new positions; the network runs on them at the next `propose`."""
        features = committed.features
        assert features is not None, "an EAGLE head needs the target's features"
        rows = committed.rows
        for i, (slot, text, count) in enumerate(zip(rows.slots, rows.texts, committed.counts, strict=True)):
            if count:
                # Copy, because `features` may be a view into a buffer that the next forward reuses.
                state.pending[slot].append((text[len(text) - count :], features[i : i + 1, :count].clone()))
                if self.head.window is not None:
                    forget(state, slot, self.head.window, self.head.config.layer.rope)

    def copy(self, source: int, slot: int, length: int, state: EagleState) -> None:
        self._flush([source], state)
        state.pending[slot].clear()
        copy_slot(state, source, slot, length - 1)

    def reset(self, slot: int, length: int, state: EagleState) -> None:
        """Keeps length - 1 positions, each a pair of a feature and the token after it."""
        if length > 0:
            self._flush([slot], state)
        state.pending[slot].clear()
        keep(state, slot, max(length - 1, 0))

    def propose(self, rows: Rows, state: EagleState) -> DraftTree:
        self._flush(rows.slots, state)
        depth = rows.depth(self.policy.depth)
        if depth < 1:
            return trees.root_only(rows.roots)
        drawn = self.needs.samples and rows.sample
        if rows.prices is not None and isinstance(self.policy, Chain):
            return self._priced(rows, state, rows.prices)
        if isinstance(self.policy, DynamicTree) or (isinstance(self.policy, Chain) and not drawn):
            return self._grown(rows, state, _fitted(self.policy, depth))
        paths = paths_of(self.policy, depth)
        if not drawn:
            return self._static(rows, state, paths)
        draws = DrawnCandidates(rows, self.head.draft_to_target, self.target.shape.vocab_size)
        return draws.pack(self._static(rows, state, paths, draws))

    def _flush(self, slots: Sequence[int], state: EagleState) -> None:
        """Runs the network on the pending positions."""
        waiting = [slot for slot in slots if state.pending[slot]]
        if not waiting:
            return
        tokens, features = padded([state.pending[slot] for slot in waiting])
        if features.dtype != self._rotary.dtype:
            features = features.to(self._rotary.dtype)
        if self._draft is None:
            self._ingest(tokens, features, waiting, state)
        else:
            assert isinstance(self._network, NativeNetwork)
            self._network.ingest(self._draft, tokens, features, state.cache, waiting, state.hidden, state.logits)
        lengths = state.cache.lengths.tolist()
        for slot, row in zip(waiting, tokens, strict=True):
            state.cache.set_length(slot, lengths[slot] + len(row))
            state.pending[slot].clear()

    def _ingest(
        self, given: Sequence[Sequence[int]], features: Tensor, slots: Sequence[int], state: EagleState
    ) -> None:
        """Runs the network on (B, T) padded positions, and keeps what drafts begin with."""
        device, width = features.device, features.shape[1]
        tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in given])
        positions = state.cache.lengths[slots][:, None] + torch.arange(width)
        last = torch.tensor([len(row) - 1 for row in given])[:, None]
        tokens, positions, last = trees.to_device(device, tokens, positions, last)
        network, at = self._network, trees.select(device, slots)
        stream = self._forward(tokens, network.fuse(features), positions, None, state.cache, slots)
        at_last = stream[:, -1]
        if len(slots) > 1:
            at_last = stream.gather(1, last[:, :, None].expand(-1, -1, stream.shape[2]))[:, 0]
        state.hidden[at] = network.feedback(at_last)
        state.logits[at] = self._logits(at_last).float()

    def _forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        ancestors: Tensor | None,
        cache: KVCache,
        rows: Sequence[int],
        offset: int = 0,
    ) -> Tensor:
        own = self.head.embedding
        embedded = self.target.embed(tokens).to(hidden.dtype) if own is None else embedding(tokens, own)
        network, arguments = self._network, (embedded, hidden, positions, ancestors, cache, rows, self._rotary, offset)
        if isinstance(network, NativeNetwork):
            return network.forward(*arguments)
        return forward_network(network, *arguments)

    def _logits(self, stream: Tensor) -> Tensor:
        network = self._network
        if isinstance(network, EagleNetwork) or network.config.kind == "eagle":
            return self.target.project(stream.to(self.target.dtype))
        return network.logits(stream)

    def _grown(self, rows: Rows, state: EagleState, policy: DynamicTree) -> DraftTree:
        """Drafts a dynamic tree in one call where the kernels can."""
        k = policy.top_k
        if self._draft is None or k > min(MOST_KEPT, state.logits.shape[1]):
            return self._dynamic(rows, state, policy)
        growth = Growth(policy.depth, k, k, policy.num_nodes - 1, policy.min_prob)
        return self._in_one_call(self._draft, rows, state, growth)[0]

    def _in_one_call(self, draft: NativeDraft, rows: Rows, state: EagleState, growth: Growth) -> tuple[DraftTree, int]:
        """Returns the trees and how many levels were drafted."""
        network = self._network
        assert isinstance(network, NativeNetwork)
        races = self._coupling.races(rows) if rows.sample else ()
        return network.draft(draft, rows.roots, state.logits, state.hidden, state.cache, rows.slots, growth, races)

    def _dynamic(self, rows: Rows, state: EagleState, policy: DynamicTree) -> DraftTree:
        """EAGLE-2: expands the best `top_k` nodes of each level, then reranks the whole pool."""
        at, k, limit = trees.select(self.target.device, rows.slots), policy.top_k, policy.num_nodes - 1
        floor = math.log(policy.min_prob) if policy.min_prob > 0 else -math.inf
        scores, tokens = self._candidates(self._coupling(state.logits[at], rows, 1), k)  # (B, k) each
        level = first_level(tokens, state.hidden[at][:, None])
        pool = Pool([tokens], [scores], [])
        index = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)  # the level in the pool
        for depth in range(1, policy.depth):
            # The host waits for the device in each test, so a device is asked once.
            if (depth == 1 or tokens.device.type == "cpu") and pool.settled(scores, limit, floor):
                break
            stream = self._feed(level, depth, rows.slots, state)
            child_scores, child_tokens = self._candidates(self._coupling(self._logits(stream), rows, depth + 1), k)
            joint, child_tokens = (scores[:, :, None] + child_scores).flatten(1), child_tokens.flatten(1)  # (B, W * k)
            base = pool.add(child_tokens, joint, index)
            feedback = self._network.feedback(stream)
            if joint.shape[1] == 1:
                scores, level, index = joint, level.after(child_tokens, feedback), index + 1
                continue
            picked = joint.sort(dim=1, descending=True, stable=True).indices[:, :k]
            scores, index = joint.gather(1, picked), picked + base
            level = level.below(child_tokens.gather(1, picked), feedback, picked // k)
        return pool.best(rows.roots, limit, floor)

    def _priced(self, rows: Rows, state: EagleState, prices: Prices) -> DraftTree:
        """Drafts a chain while its next level pays, with the next-best children of all its nodes."""
        paces = self._paces[rows.sample]
        depth = rows.depth(MOST_LEVELS)
        floors = prices.floors(len(rows.slots), depth, median(paces) if paces else 0.0)
        began = time.perf_counter()
        if self._draft is not None and state.logits.shape[1] >= SIBLINGS:
            growth = Growth(depth, SIBLINGS, least=LEAST, floors=floors)
            tree, levels = self._in_one_call(self._draft, rows, state, growth)
        else:
            tokens, scores = self._levels(rows, state, floors)
            tree, levels = with_siblings(rows.roots, tokens, scores, LEAST), tokens.shape[1]
        if levels > 1:
            paces.append((time.perf_counter() - began) / (levels - 1))
        return tree

    def _levels(self, rows: Rows, state: EagleState, floors: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Returns the `SIBLINGS` best children of each node of a chain, (B, L, k) tokens and joint log-probabilities.

        A level follows unless the probabilities of the rows' likeliest children sum to less than the level's floor.
        """
        at, network = trees.select(self.target.device, rows.slots), self._network
        logits, feedback = state.logits[at], state.hidden[at]
        scores, tokens = self._candidates(self._coupling(logits, rows, 1), SIBLINGS)
        levels = [(tokens, scores)]
        level = first_level(tokens[:, :1], feedback[:, None])
        for depth in range(1, len(floors)):
            if float(levels[-1][1][:, 0].exp().sum()) < floors[depth - 1]:
                break
            stream = self._feed(level, depth, rows.slots, state)
            scores, tokens = self._candidates(self._coupling(self._logits(stream), rows, depth + 1)[:, 0], SIBLINGS)
            levels.append((tokens, levels[-1][1][:, :1] + scores))
            level = level.after(tokens[:, :1], network.feedback(stream))
        return torch.stack([tokens for tokens, _ in levels], 1), torch.stack([scores for _, scores in levels], 1)

    def _static(
        self,
        rows: Rows,
        state: EagleState,
        paths: Sequence[tuple[int, ...]],
        draws: DrawnCandidates | None = None,
    ) -> DraftTree:
        """EAGLE-1: fills a fixed tree with the tokens of given ranks, or drawn in that order."""
        parents, device = parents_of(paths), self.target.device
        at = trees.select(device, rows.slots)
        # No level reads the roots, so they need no copy to the device.
        root = torch.zeros(len(rows.roots), dtype=torch.int64, device=device)
        logits, feedback = state.logits[at][:, None], state.hidden[at][:, None]
        level: Level | None = None
        above: list[int] = []  # the level's nodes

        def candidates(depth: int, nodes: Sequence[int], tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
            nonlocal logits, feedback, level, above
            if depth > 1:
                fed = tokens[:, trees.index_on(device, *nodes)]
                if level is None:
                    level = first_level(fed, feedback)
                else:
                    fathers = trees.index_on(device, *(above.index(parents[node]) for node in nodes))
                    level = level.below(fed, feedback, fathers.expand(len(root), -1))
                above = list(nodes)
                stream = self._feed(level, depth - 1, rows.slots, state)
                logits, feedback = self._logits(stream), self._network.feedback(stream)
            if draws is not None:
                return draws(logits, count, nodes, tokens, parents)
            return self._candidates(self._coupling(logits, rows, depth), count)

        tree = fill_tree(root, paths, candidates)
        tree.tokens[:, 0] = torch.tensor(rows.roots)
        return tree

    def _feed(self, level: Level, depth: int, slots: Sequence[int], state: EagleState) -> Tensor:
        """Runs one level of the tree, (B, W) nodes at `depth`, through the network: (B, W, H)."""
        starts = trees.index_on(level.tokens.device, *state.cache.lengths[list(slots)].tolist())
        positions = (starts[:, None] + depth - 1).expand(-1, level.tokens.shape[1])
        return self._forward(level.tokens, level.hidden, positions, level.visible, state.cache, slots, level.offset)

    def _candidates(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities (float32) and target ids of each node's k likeliest tokens."""
        logits = logits.float()
        values, ids = logits.topk(min(k, logits.shape[-1]), dim=-1)
        mapping = self.head.draft_to_target
        return values - logits.logsumexp(-1, keepdim=True), ids if mapping is None else mapping[ids]


def _fitted(policy: Chain | DynamicTree, depth: int) -> DynamicTree:
    """Limits the policy to `depth`; a chain is a dynamic tree with one candidate per level."""
    if isinstance(policy, Chain):
        return DynamicTree(depth + 1, depth, 1, policy.min_prob)
    room = 1 + policy.top_k + (depth - 1) * policy.top_k**2
    return replace(policy, depth=depth, num_nodes=min(policy.num_nodes, room))


def _equal(mine: Tensor | None, theirs: Tensor | None) -> bool:
    return mine is theirs if mine is None or theirs is None else torch.equal(mine, theirs)
