"""What Medusa and Hydra share: K heads that read the target's "final" feature, and static trees.

With h the feature from which the target read out the root, head i (from 1) predicts the token i
positions behind the root::

    position      t      t+1    t+2    t+3
    feature       h
    token                root   d1     d2
    read from h          LM     head 1 head 2

Each head turns h into a stream of the same width; an LM head reads it out: the target's own, or
a smaller one of the heads'.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aquiline.drafters.trees import Chain, StaticTree
from aquiline.targets.target import Feature, Target
from aquiline.tree import DraftTree

GUESSED_ACCURACIES = tuple(tuple(0.5 * 0.8**depth / (1 + rank) ** 1.3 for rank in range(8)) for depth in range(8))
"""How often a head's candidate of a rank is right, before it was measured."""

DEFAULT_NODES = 24
"""Nodes of a default tree, the root included."""


@dataclass(frozen=True)
class FinalHeadsConfig:
    """K Medusa or Hydra heads.

    Attributes:
        kind: "medusa" or "hydra".
        num_heads: K, the deepest draft, ≥ 1.
        hidden_size: H of the target.
        vocab_size: V of the target.
        draft_vocab_size: ids that the heads draft; V where there is no reduction.
        num_blocks: residual blocks of a head, ≥ 1.
        own_lm_head: the heads have an LM head for all; otherwise they share the target's.
        rms_norm_eps: of Hydra's input norms.
        accuracies: per head, how often its candidate of each rank was right when it was
            measured; decides the default tree. Empty: unknown.
    """

    kind: str
    num_heads: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_blocks: int = 1
    own_lm_head: bool = False
    rms_norm_eps: float = 1e-5
    accuracies: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("medusa", "hydra"):
            raise ValueError(f"heads of kind {self.kind!r} are not known; allowed: medusa, hydra")
        for name in ("num_heads", "num_blocks", "draft_vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: ≥ 1")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}")


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b); begins as the identity.

    Args:
        size: width of x.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(…, size) → (…, size)."""
        return x + nn.functional.silu(self.linear(x))


class LinearHead(nn.Module):
    """A linear map, then residual blocks; begins by passing on the feature, its first `size` inputs.

    Args:
        inputs: width of what it reads, the feature first.
        size: width of the feature and of the stream.
        blocks: residual blocks.
    """

    def __init__(self, inputs: int, size: int, blocks: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, size)
        self.blocks = nn.Sequential(*(ResidualBlock(size) for _ in range(blocks)))
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(size, inputs))
            self.linear.bias.zero_()

    def forward(self, read: Tensor) -> Tensor:
        """(…, inputs) → (…, size)."""
        result: Tensor = self.blocks(self.linear(read))
        return result


class FinalNetwork(nn.Module):
    """Base of both networks: a configuration and, perhaps, an LM head."""

    def __init__(self, config: FinalHeadsConfig) -> None:
        super().__init__()
        self.config = config
        if config.own_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)


@dataclass(eq=False)
class FinalHeads:
    """Heads with what they need from outside their parameters.

    Attributes:
        network: a `MedusaNetwork` or a `HydraNetwork`.
        draft_to_target: (Vd,) int64 target id of each draft id, or None where they coincide.
        target_fingerprint: of the target that they were trained for, or None if unknown.
    """

    network: FinalNetwork
    draft_to_target: Tensor | None = None
    target_fingerprint: str | None = None

    @property
    def config(self) -> FinalHeadsConfig:
        """The network's configuration."""
        return self.network.config

    def logits(self, stream: Tensor, target: Target) -> Tensor:
        """Reads streams out over the draft vocabulary, (…, H) → (…, Vd), at least float32."""
        if self.config.own_lm_head:
            logits: Tensor = self.network.lm_head(stream)
            return logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = target.project(stream.to(target.dtype))
        return logits if self.draft_to_target is None else logits[..., self.draft_to_target]


@dataclass(eq=False)
class FinalState:
    """The last feature of each row, (rows, H)."""

    feature: Tensor


Candidates = Callable[[int, Sequence[int], Tensor, int], tuple[Tensor, Tensor]]
"""(depth from 1, W node indices, (B, N) tokens so far, k) → (B, W, k) log-probabilities and target ids."""


class FinalDrafter:
    """Base of both drafters: keeps the last feature and fills static trees.

    Args:
        heads: the heads.
        target: gives embeddings and, where the heads have none, the LM head.
        policy: a chain or a static tree, at most K deep; None: the sparse tree of `DEFAULT_NODES`
            nodes that is the best for the heads' measured accuracies.
    """

    features: tuple[Feature, ...] = ("final",)

    def __init__(self, heads: FinalHeads, target: Target, policy: Chain | StaticTree | None = None) -> None:
        config, shape = heads.config, target.shape
        if (config.hidden_size, config.vocab_size) != (shape.hidden_size, shape.vocab_size):
            raise ValueError(
                f"the {config.kind} heads were made for hidden_size {config.hidden_size} and vocab_size "
                f"{config.vocab_size}; this target has {shape.hidden_size} and {shape.vocab_size}"
            )
        if policy is None:
            policy = sparse_tree(config.accuracies or GUESSED_ACCURACIES[: config.num_heads], DEFAULT_NODES)
        if not isinstance(policy, Chain | StaticTree):
            raise ValueError(f"{config.kind} heads draft a chain or a static tree; got {policy}")
        if policy.depth > config.num_heads:
            raise ValueError(
                f"the tree is {policy.depth} deep, but there are {config.num_heads} heads; make it flatter"
            )
        if isinstance(policy, Chain) and policy.min_prob:
            raise ValueError(f"{config.kind} heads draft chains of fixed length; min_prob must be 0")
        self.heads, self.target, self.policy = heads, target, policy
        reduced = heads.draft_to_target is not None and not config.own_lm_head
        self._read_out = lm_head_rows(target, heads.draft_to_target) if reduced else None

    def new_state(self, rows: int, capacity: int) -> FinalState:
        """Allocates the rows' features."""
        width, weight = self.heads.config.hidden_size, next(self.heads.network.parameters())
        return FinalState(torch.zeros(rows, width, dtype=weight.dtype, device=weight.device))

    def extend(
        self,
        tokens: Tensor,
        features: Tensor | None,
        num_new: Sequence[int],
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: FinalState,
    ) -> None:
        """Keeps the feature from which the last token was read out."""
        assert features is not None, 'the heads need the target feature "final"'
        for i, (row, count) in enumerate(zip(rows, num_new, strict=True)):
            if count:
                state.feature[row] = features[i, count - 1]

    def reset(self, row: int, length: int, state: FinalState) -> None:
        """See `Drafter.reset`; the next `extend` overwrites the feature."""

    def paths(self, max_depth: int | None) -> list[tuple[int, ...]]:
        """The tree's paths down to `max_depth`."""
        chain = tuple((0,) * depth for depth in range(1, self.policy.depth + 1))
        paths = self.policy.paths if isinstance(self.policy, StaticTree) else chain
        return [path for path in paths if max_depth is None or len(path) <= max_depth]

    def logits(self, stream: Tensor) -> Tensor:
        """Reads streams out over the draft vocabulary, (…, H) → (…, Vd), at least float32."""
        if self._read_out is None:
            return self.heads.logits(stream, self.target)
        logits = nn.functional.linear(stream.to(self._read_out.dtype), self._read_out)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def scored(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest of draft logits (…, Vd), as log-probabilities and target ids (…, k)."""
        values, ids = logits.topk(k, dim=-1)
        mapping = self.heads.draft_to_target
        return values - logits.logsumexp(-1, keepdim=True), ids if mapping is None else mapping[ids]


def lm_head_rows(target: Target, ids: Tensor | None) -> Tensor | None:
    """The rows of a target's LM head for some tokens, (Vd, H): reading these out is cheaper than all.

    Found by projecting the unit vectors, since a `Target` does not show its weights; None where
    the read-out is not linear (a soft-cap, a bias).

    Args:
        target: the target.
        ids: (Vd,) int64.
    """
    if ids is None:
        return None
    size = target.shape.hidden_size
    rows = target.project(torch.eye(size, dtype=target.dtype, device=target.device))[:, ids].t()
    probe = torch.linspace(-3, 3, size, dtype=target.dtype, device=target.device)[None]
    expected, found = target.project(probe)[0, ids], rows.to(probe.dtype) @ probe[0]
    close = torch.allclose(found.to(expected.dtype), expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))
    return rows.to(target.dtype).contiguous() if close else None


def fill_tree(root: Tensor, paths: Sequence[tuple[int, ...]], candidates: Candidates) -> DraftTree:
    """Fills a static tree level by level.

    Args:
        root: (B,) int64.
        paths: ranks, shallower first; every proper prefix of a path is a path.
        candidates: what the heads propose below given nodes.
    """
    batch, index = len(root), {(): 0} | {path: i + 1 for i, path in enumerate(paths)}
    tokens = root[:, None].repeat(1, len(index))
    joint = torch.zeros(batch, len(index), device=root.device)
    for depth in range(1, max((len(path) for path in paths), default=0) + 1):
        here = [path for path in paths if len(path) == depth]
        above = list(dict.fromkeys(path[:-1] for path in here))
        parents = [index[path] for path in above]
        scores, ids = candidates(depth, parents, tokens, 1 + max(path[-1] for path in here))
        slots = torch.tensor([above.index(path[:-1]) for path in here], device=root.device)
        ranks = torch.tensor([path[-1] for path in here], device=root.device)
        nodes = [index[path] for path in here]
        tokens[:, nodes] = ids[:, slots, ranks]
        joint[:, nodes] = joint[:, [index[path[:-1]] for path in here]] + scores[:, slots, ranks].float()
    shape = torch.tensor([-1, *(index[path[:-1]] for path in paths)], device=root.device)
    return DraftTree(
        tokens=tokens,
        parents=shape.expand(batch, -1),
        num_nodes=torch.full((batch,), len(index), device=root.device),
        log_probs=joint,
    )


def sparse_tree(accuracies: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
    """The nodes of the Cartesian product of candidates that are accepted most often.

    A node's chance is the product of the accuracies along its path, as if they were independent;
    the tree takes the `num_nodes` − 1 likeliest.

    Args:
        accuracies: per head, how often its candidate of each rank is right, in [0, 1].
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
