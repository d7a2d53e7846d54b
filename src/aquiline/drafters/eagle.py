"""EAGLE-1, EAGLE-2 and EAGLE-3 as drafters: a draft network times a tree policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from aquiline import tree as trees
from aquiline.cache import KVCache, commit, copy_prefix, truncate
from aquiline.drafters.coupled import Coupling
from aquiline.drafters.drafter import Committed, Needs, Rows
from aquiline.drafters.eagle_network import (
    DraftHead,
    EagleNetwork,
    Network,
    forward_network,
    head_on,
    join_network,
    new_draft_cache,
)
from aquiline.drafters.filling import Pool, fill_tree, parents_of
from aquiline.drafters.native import NativeNetwork, native_network
from aquiline.drafters.sampled import DrawnCandidates, check_ranks
from aquiline.drafters.trees import Chain, DynamicTree, StaticTree, TreePolicy, paths_of
from aquiline.native.chain import NativeChain
from aquiline.native.codes import WeightFormat
from aquiline.targets.native import NativeDecoder
from aquiline.targets.packed import packed as packed_copy
from aquiline.targets.rope import RotaryTable
from aquiline.targets.target import Target
from aquiline.tree import DraftTree


@dataclass(eq=False)
class EagleState:
    """The state of an `EagleDrafter`.

    Attributes:
        cache: the head's own keys and values, computed only from the target's features.
        hidden: (slots, H) feedback at the last ingested position.
        logits: (slots, Vd) draft logits at that position.
        roots: (slots,) int64 token after the last ingested position, below which the head drafts.
        pending: per slot, chunks not yet forwarded (tokens (n,), features (n, F)).
    """

    cache: KVCache
    hidden: Tensor
    logits: Tensor
    roots: Tensor
    pending: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)


class EagleDrafter:
    """Drafts with an EAGLE head; coupled with the target's draws where a row samples.

    Keys and values of accepted tokens are always computed from the target's features: those written
    while drafting lie beyond the committed length and are overwritten.

    Args:
        head: the draft head; its network moves to the target's device.
        target: provides embeddings, and for EAGLE-1/2 the LM head.
        policy: the shape of the trees.
        sampled: for rows that sample, draw children instead of taking the likeliest (EAGLE-1's
            Algorithm 1); needs a chain or a static tree. The output then equals plain decoding in
            distribution, not token for token.
        packed: draft with a fast form of the current network: on a CPU a copy, if the machine supports
            it; elsewhere joined projections. Not for a network whose weights still change.
        form: with `packed` on the CPU kernels, quantise the copy's weights.
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
        if sampled and isinstance(policy, DynamicTree):
            raise ValueError("sampled drafts need a tree of fixed shape; use a chain or a static tree")
        if sampled and isinstance(policy, StaticTree):
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
            join_network(head.network)
        self._chain = self._native_chain()

    def _native_chain(self) -> NativeChain | None:
        """What drafts chains in one call, where network and target are native."""
        network, target, table = self._network, self.target, self.head.embedding
        if not isinstance(network, NativeNetwork) or (table is None and not isinstance(target, NativeDecoder)):
            return None
        project = target.project if isinstance(target, NativeDecoder) else None
        if table is None:
            assert isinstance(target, NativeDecoder)
            table = target.embedding
        return network.chain(table, project, self.head.draft_to_target)

    def new_state(self, slots: int, capacity: int) -> EagleState:
        network, config = self.head.network, self.head.config
        weight = network.fc.weight
        limit = self.target.shape.max_positions
        return EagleState(
            cache=new_draft_cache(network, slots, capacity, limit),
            hidden=torch.zeros(slots, config.hidden_size, dtype=weight.dtype, device=weight.device),
            logits=torch.zeros(slots, config.draft_vocab_size, device=weight.device),
            roots=torch.zeros(slots, dtype=torch.int64, device=weight.device),
            pending=[[] for _ in range(slots)],
        )

    def extend(self, committed: Committed, state: EagleState) -> None:
        """Keeps the new positions; the network runs on them at the next `propose`."""
        features = committed.features
        assert features is not None, "an EAGLE head needs the target's features"
        for i, (slot, count) in enumerate(zip(committed.rows.slots, committed.counts, strict=True)):
            if count:
                # Copy, because `features` may be a view into a buffer that the next forward reuses.
                state.pending[slot].append((committed.tokens[i, :count].clone(), features[i, :count].clone()))

    def copy(self, source: int, slot: int, length: int, state: EagleState) -> None:
        self._flush([source], state)
        state.pending[slot].clear()
        copy_prefix(state.cache, source, slot, length - 1)

    def reset(self, slot: int, length: int, state: EagleState) -> None:
        """Keeps length - 1 positions, each a pair of a feature and the token after it."""
        if length > 0:
            self._flush([slot], state)
        state.pending[slot].clear()
        truncate(state.cache, slot, min(max(length - 1, 0), int(state.cache.lengths[slot])))

    def propose(self, rows: Rows, state: EagleState) -> DraftTree:
        self._flush(rows.slots, state)
        depth = rows.depth(self.policy.depth)
        if depth < 1:
            return trees.root_only(rows.roots)
        drawn = self.needs.samples and rows.sample
        if isinstance(self.policy, DynamicTree) or (isinstance(self.policy, Chain) and not drawn):
            return self._dynamic(rows, state, _fitted(self.policy, depth))
        paths = paths_of(self.policy, depth)
        if not drawn:
            return self._static(rows, state, paths)
        draws = DrawnCandidates(rows, self.head.draft_to_target, self.target.shape.vocab_size)
        return draws.pack(self._static(rows, state, paths, draws))

    # -- ingesting --------------------------------------------------------------------------

    def _flush(self, slots: Sequence[int], state: EagleState) -> None:
        """Runs the network on the pending positions."""
        waiting = [slot for slot in slots if state.pending[slot]]
        if not waiting:
            return
        pieces = [
            (torch.cat([t for t, _ in state.pending[s]]), torch.cat([f for _, f in state.pending[s]])) for s in waiting
        ]
        counts = [len(tokens) for tokens, _ in pieces]
        width = max(counts)
        if len(pieces) == 1:
            tokens, features = pieces[0][0][None], pieces[0][1][None]
        else:
            tokens = torch.stack([torch.nn.functional.pad(t, (0, width - len(t))) for t, _ in pieces])
            features = torch.stack([torch.nn.functional.pad(f, (0, 0, 0, width - len(f))) for _, f in pieces])
        positions = state.cache.lengths[waiting][:, None] + torch.arange(width)
        positions, last = trees.to_device(tokens.device, positions, torch.tensor(counts)[:, None] - 1)
        network, at = self._network, trees.select(tokens.device, waiting)
        fused = network.fuse(features.to(self._rotary.dtype))
        stream = self._forward(tokens, fused, positions, None, state.cache, waiting)
        at_last, roots = stream[:, -1], tokens[:, -1]
        if len(waiting) > 1:
            at_last = stream.gather(1, last[:, :, None].expand(-1, -1, stream.shape[2]))[:, 0]
            roots = tokens.gather(1, last)[:, 0]
        state.hidden[at] = network.feedback(at_last)
        state.logits[at] = self._logits(at_last).float()
        state.roots[at] = roots
        for slot, count in zip(waiting, counts, strict=True):
            commit(state.cache, torch.arange(count)[None], [slot])
            state.pending[slot].clear()

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
        if self.head.embedding is not None:
            embedded = torch.nn.functional.embedding(tokens, self.head.embedding)
        else:
            embedded = self.target.embed(tokens).to(hidden.dtype)
        network, arguments = self._network, (embedded, hidden, positions, ancestors, cache, rows, self._rotary, offset)
        if isinstance(network, NativeNetwork):
            return network.forward(*arguments)
        return forward_network(network, *arguments)

    def _logits(self, stream: Tensor) -> Tensor:
        network = self._network
        if isinstance(network, EagleNetwork) or network.config.kind == "eagle":
            return self.target.project(stream.to(self.target.dtype))
        return network.logits(stream)

    def _target_ids(self, draft_ids: Tensor) -> Tensor:
        mapping = self.head.draft_to_target
        return draft_ids if mapping is None else mapping[draft_ids]

    # -- trees ------------------------------------------------------------------------------

    def _dynamic(self, rows: Rows, state: EagleState, policy: DynamicTree) -> DraftTree:
        """EAGLE-2: expands the best `top_k` nodes of each level, then reranks the whole pool."""
        at, k, limit = trees.select(self.target.device, rows.slots), policy.top_k, policy.num_nodes - 1
        floor = math.log(policy.min_prob) if policy.min_prob > 0 else -math.inf
        if k == 1 and self._chain is not None and not rows.sample:
            return self._chained(rows, state, policy.depth, floor)
        scores, tokens = self._candidates(self._coupling(state.logits[at], rows, 1), k)  # (B, k) each
        level = _first_level(tokens, state.hidden[at][:, None])
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

    def _chained(self, rows: Rows, state: EagleState, depth: int, floor: float) -> DraftTree:
        """Chains of the likeliest tokens; the levels of `_dynamic` in one call."""
        network, chain, slots = self._network, self._chain, rows.slots
        assert isinstance(network, NativeNetwork) and chain is not None
        at = trees.select(self.target.device, slots)
        tokens, scores = network.draft(
            chain, state.logits[at], state.hidden[at], state.cache, list(slots), depth, floor
        )
        index = torch.arange(tokens.shape[1]).expand(len(slots), -1)
        pool = Pool([tokens[:, :1]], [scores[:, :1]], [])
        for level in range(1, tokens.shape[1]):
            pool.add(tokens[:, level : level + 1], scores[:, level : level + 1], index[:, level - 1 : level])
        return pool.best(rows.roots, depth, floor)

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
        root = state.roots[at]
        logits, feedback = state.logits[at][:, None], state.hidden[at][:, None]
        level: _Level | None = None
        above: list[int] = []  # the level's nodes

        def candidates(depth: int, nodes: Sequence[int], tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
            nonlocal logits, feedback, level, above
            if depth > 1:
                fed = tokens[:, trees.index_on(device, *nodes)]
                if level is None:
                    level = _first_level(fed, feedback)
                else:
                    fathers = trees.index_on(device, *(above.index(parents[node]) for node in nodes))
                    level = level.below(fed, feedback, fathers.expand(len(root), -1))
                above = list(nodes)
                stream = self._feed(level, depth - 1, rows.slots, state)
                logits, feedback = self._logits(stream), self._network.feedback(stream)
            if draws is not None:
                return draws(logits, count, nodes, tokens, parents)
            return self._candidates(self._coupling(logits, rows, depth), count)

        return fill_tree(root, paths, candidates)

    def _feed(self, level: _Level, depth: int, slots: Sequence[int], state: EagleState) -> Tensor:
        """Runs one level of the tree, (B, W) nodes at `depth`, through the network: (B, W, H)."""
        starts = trees.index_on(level.tokens.device, *state.cache.lengths[list(slots)].tolist())
        positions = (starts[:, None] + depth - 1).expand(-1, level.tokens.shape[1])
        return self._forward(level.tokens, level.hidden, positions, level.visible, state.cache, slots, level.offset)

    def _candidates(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Returns the k likeliest (log-probability float32, target id) of each node."""
        logits = logits.float()
        values, ids = logits.topk(min(k, logits.shape[-1]), dim=-1)
        return values - logits.logsumexp(-1, keepdim=True), self._target_ids(ids)


def _fitted(policy: Chain | DynamicTree, depth: int) -> DynamicTree:
    """Limits the policy to `depth`; a chain is a dynamic tree with one candidate per level."""
    if isinstance(policy, Chain):
        return DynamicTree(depth + 1, depth, 1, policy.min_prob)
    room = 1 + policy.top_k + (depth - 1) * policy.top_k**2
    return replace(policy, depth=depth, num_nodes=min(policy.num_nodes, room))


@dataclass(frozen=True, eq=False)
class _Level:
    """The nodes of one level as network input.

    Attributes:
        tokens: (B, W) int64.
        hidden: (B, W, H) feedback of their parents.
        visible: (B, W, offset + W) bool over the slots of all levels fed so far and this one; None for
            a chain, which sees all of them.
        offset: slots of earlier levels.
    """

    tokens: Tensor
    hidden: Tensor
    visible: Tensor | None
    offset: int

    def after(self, tokens: Tensor, feedback: Tensor) -> _Level:
        """Builds the next level of a chain, (B, 1)."""
        return _Level(tokens, feedback, None, self.offset + 1)

    def below(self, tokens: Tensor, feedback: Tensor, parents: Tensor) -> _Level:
        """Builds the next level; `parents` (B, W') index this level's nodes, with `feedback` (B, W, H)."""
        width, offset = tokens.shape[1], self.offset + self.tokens.shape[1]
        if self.visible is None and width == 1:
            return self.after(tokens, feedback)
        seen = self.visible
        if seen is None:
            seen = torch.ones(len(tokens), 1, offset, dtype=torch.bool, device=tokens.device)
        inherited = seen.gather(1, parents[:, :, None].expand(-1, -1, offset))
        return _Level(
            tokens=tokens,
            hidden=feedback.gather(1, parents[:, :, None].expand(-1, -1, feedback.shape[2])),
            visible=torch.cat((inherited, _eye(len(tokens), width, tokens.device)), dim=2),
            offset=offset,
        )


def _first_level(tokens: Tensor, feedback: Tensor) -> _Level:
    """Builds the level below the root: tokens (B, W), `feedback` (B, 1, H) is the root's."""
    width = tokens.shape[1]
    visible = None if width == 1 else _eye(len(tokens), width, tokens.device)
    return _Level(tokens, feedback.expand(-1, width, -1), visible, 0)


def _eye(batch: int, width: int, device: torch.device) -> Tensor:
    return torch.eye(width, dtype=torch.bool, device=device).expand(batch, -1, -1)
