"""Medusa and Hydra as drafters: each head proposes tokens for one level of a static tree."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from aquiline import tree as trees
from aquiline.drafters.coupled import Coupling
from aquiline.drafters.drafter import Committed, Needs, Rows
from aquiline.drafters.filling import Candidates, fill_tree, parents_of
from aquiline.drafters.parallel_network import (
    HydraNetwork,
    MedusaNetwork,
    ParallelConfig,
    ParallelNetwork,
    PublishedHydraNetwork,
    PublishedMedusaNetwork,
)
from aquiline.drafters.trees import Chain, StaticTree, paths_of
from aquiline.targets.target import Target
from aquiline.tree import DraftTree

GUESSED_ACCURACIES = tuple(tuple(0.5 * 0.8**depth / (1 + rank) ** 1.3 for rank in range(8)) for depth in range(8))
"""Assumed accuracy of a head's candidate by rank, for heads without measurements."""

DEFAULT_NODES = 24
"""Nodes of the default tree, including the root."""


@dataclass(eq=False)
class ParallelHeads:
    """Medusa or Hydra heads with their vocabulary map.

    Attributes:
        network: one of the networks of `parallel_network`.
        draft_to_target: (Vd,) int64 target id of each draft id, or None if they coincide.
        target_fingerprint: fingerprint of the target they were trained for, or None if unknown.
        gamma: exponent of their probabilities in coupled drafts, > 0; None if not measured.
    """

    network: ParallelNetwork
    draft_to_target: Tensor | None = None
    target_fingerprint: str | None = None
    gamma: float | None = None

    @property
    def config(self) -> ParallelConfig:
        return self.network.config

    def logits(self, stream: Tensor, target: Target) -> Tensor:
        """Maps streams to logits over the draft vocabulary, (…, H) → (…, Vd), in at least float32.

        The streams of published networks already are logits.
        """
        if isinstance(self.network, PublishedMedusaNetwork | PublishedHydraNetwork):
            return stream.to(torch.promote_types(stream.dtype, torch.float32))
        if self.config.own_lm_head:
            logits: Tensor = self.network.lm_head(stream)
            return logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = target.project(stream.to(target.dtype))
        return logits if self.draft_to_target is None else logits[..., self.draft_to_target]


@dataclass(eq=False)
class ParallelState:
    """The last feature of each slot, (slots, H)."""

    feature: Tensor


class ParallelDrafter:
    """Drafts with Medusa or Hydra heads: keeps the last feature and fills a static tree.

    Args:
        target: provides embeddings and, unless the heads have their own, the LM head.
        policy: a chain or a static tree, at most K deep; None: the best sparse tree of
            `DEFAULT_NODES` nodes for the heads' measured accuracies.
    """

    needs = Needs(features=("final",))

    def __init__(self, heads: ParallelHeads, target: Target, policy: Chain | StaticTree | None = None) -> None:
        config, shape = heads.config, target.shape
        if (config.hidden_size, config.vocab_size) != (shape.hidden_size, shape.vocab_size):
            raise ValueError(
                f"the {config.kind} heads were trained for hidden_size {config.hidden_size} and vocab_size "
                f"{config.vocab_size}; this target has {shape.hidden_size} and {shape.vocab_size}"
            )
        if policy is None:
            policy = sparse_tree(config.accuracies or GUESSED_ACCURACIES[: config.num_heads], DEFAULT_NODES)
        if policy.depth > config.num_heads:
            raise ValueError(
                f"the tree is {policy.depth} deep; allowed: depth ≤ {config.num_heads}, the number of heads; "
                "give a shallower tree, or leave it out"
            )
        if isinstance(policy, Chain) and policy.min_prob:
            raise ValueError(
                f"min_prob is {policy.min_prob}; allowed: 0, because {config.kind} heads draft chains of fixed length"
            )
        mapping = None if heads.draft_to_target is None else heads.draft_to_target.to(target.device)
        self.heads = replace(heads, network=heads.network.to(target.device), draft_to_target=mapping)  # moves in place
        self.target, self.policy = target, policy
        self._coupling = Coupling(heads.draft_to_target, heads.gamma)
        reduced = heads.draft_to_target is not None and not config.own_lm_head
        self._read_out = lm_head_rows(target, self.heads.draft_to_target) if reduced else None

    def new_state(self, slots: int, capacity: int) -> ParallelState:
        width, weight = self.heads.config.hidden_size, next(self.heads.network.parameters())
        return ParallelState(torch.zeros(slots, width, dtype=weight.dtype, device=weight.device))

    def extend(self, committed: Committed, state: ParallelState) -> None:
        """Keeps the feature that predicted the last token."""
        assert committed.features is not None, 'the heads need the target feature "final"'
        for i, (slot, count) in enumerate(zip(committed.rows.slots, committed.counts, strict=True)):
            if count:
                state.feature[slot] = committed.features[i, count - 1]

    def propose(self, rows: Rows, state: ParallelState) -> DraftTree:
        network, paths = self.heads.network, paths_of(self.policy, rows.depth(self.policy.depth))
        if not paths:
            return trees.root_only(rows.roots)
        final = state.feature[trees.select(self.target.device, rows.slots)]
        if isinstance(network, MedusaNetwork | PublishedMedusaNetwork):
            candidates = self._medusa(network, final, max(len(path) for path in paths), rows)
        else:
            assert isinstance(network, HydraNetwork | PublishedHydraNetwork)
            candidates = self._hydra(network, final, parents_of(paths), rows)
        root = torch.tensor(rows.roots, dtype=torch.int64, device=self.target.device)
        return fill_tree(root, paths, candidates)

    def copy(self, source: int, slot: int, length: int, state: ParallelState) -> None:
        """Does nothing: the next `extend` overwrites the feature."""

    def reset(self, slot: int, length: int, state: ParallelState) -> None:
        """Does nothing: the next `extend` overwrites the feature."""

    def _medusa(
        self, network: MedusaNetwork | PublishedMedusaNetwork, final: Tensor, depth: int, rows: Rows
    ) -> Candidates:
        """Runs all heads at once, since a node's candidates depend only on its depth."""
        # (B, depth, Vd): one matrix product for all heads.
        logits = self._logits(torch.stack([network.stream(head, final) for head in range(depth)], 1))

        def candidates(depth: int, nodes: Sequence[int], tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
            scores, ids = self._scored(self._coupling(logits[:, depth - 1], rows, depth), k)
            shape = (-1, len(nodes), -1)
            return scores[:, None].expand(shape), ids[:, None].expand(shape)

        return candidates

    def _hydra(
        self, network: HydraNetwork | PublishedHydraNetwork, final: Tensor, parents: Sequence[int], rows: Rows
    ) -> Candidates:
        """Runs the heads level by level, since they read the tokens on the path to each node."""
        lines: list[list[int]] = [[0]]  # node → nodes from the root to it
        for node, parent in enumerate(parents[1:], 1):
            lines.append([*lines[parent], node])

        def candidates(depth: int, nodes: Sequence[int], tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
            flat = trees.index_on(tokens.device, *(above for node in nodes for above in lines[node]))
            path_tokens = tokens[:, flat].view(len(tokens), len(nodes), depth)
            embedded = self.target.embed(path_tokens).to(final.dtype)  # (B, W, depth, H)
            stream = network.stream(depth - 1, final[:, None].expand(-1, len(nodes), -1), embedded)
            return self._scored(self._coupling(self._logits(stream), rows, depth), k)

        return candidates

    def _logits(self, stream: Tensor) -> Tensor:
        """Maps streams to logits over the draft vocabulary, (…, H) → (…, Vd), in at least float32."""
        if self._read_out is None:
            return self.heads.logits(stream, self.target)
        logits = nn.functional.linear(stream.to(self._read_out.dtype), self._read_out)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _scored(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities and target ids (…, k) of the k likeliest of draft logits (…, Vd)."""
        values, ids = logits.topk(k, dim=-1)
        mapping = self.heads.draft_to_target
        return values - logits.logsumexp(-1, keepdim=True), ids if mapping is None else mapping[ids]


def lm_head_rows(target: Target, ids: Tensor | None) -> Tensor | None:
    """Returns the rows of a target's LM head for some tokens, (Vd, H), to save the other rows' products.

    They are found by projecting unit vectors, since a `Target` does not expose its weights; None if
    the LM head is not linear (a soft-cap, a bias).
    """
    if ids is None:
        return None
    size = target.shape.hidden_size
    rows = target.project(torch.eye(size, dtype=target.dtype, device=target.device))[:, ids].t()
    probe = torch.linspace(-3, 3, size, dtype=target.dtype, device=target.device)[None]
    expected, found = target.project(probe)[0, ids], rows.to(probe.dtype) @ probe[0]
    close = torch.allclose(found.to(expected.dtype), expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))
    return rows.to(target.dtype).contiguous() if close else None


def sparse_tree(accuracies: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
    """Selects the nodes of the Cartesian product of candidates that are accepted most often.

    A node's probability is the product of the accuracies along its path, assuming independence; the
    tree consists of the `num_nodes` − 1 likeliest.

    Args:
        accuracies: per head, the accuracy of its candidate of each rank, in [0, 1].
        num_nodes: nodes including the root, ≥ 2.

    Source: Medusa (arXiv 2401.10774 §2.3.3).
    """
    if num_nodes < 2:
        raise ValueError(f"num_nodes is {num_nodes}; allowed: ≥ 2")
    chosen: list[tuple[int, ...]] = []
    heap: list[tuple[float, int, tuple[int, ...]]] = [
        (-accuracy, 1, (rank,)) for rank, accuracy in enumerate(accuracies[0])
    ]
    heapq.heapify(heap)
    while heap and len(chosen) < num_nodes - 1:
        chance, depth, path = heapq.heappop(heap)
        chosen.append(path)
        if depth < len(accuracies):
            for rank, accuracy in enumerate(accuracies[depth]):
                heapq.heappush(heap, (chance * accuracy, depth + 1, (*path, rank)))
    return StaticTree(tuple(chosen))
