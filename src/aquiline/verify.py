"""Verification: finds the drafted nodes that the target accepts, and the token after them.

A node is *accepted* if the emitted text contains it; `next_token` is the target's own token after the
last accepted node. A step emits the accepted nodes and the next token. A token that ends the output
is always a next token, whether it was drafted or not: nothing after it is chosen, counted or committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from aquiline.checks import check_value, number
from aquiline.race import NOT_A_NUMBER, draw, uniform
from aquiline.sampling import TokenChooser
from aquiline.tree import DraftTree

Ends = Callable[[int], bool]
"""Receives a row's emitted tokens, each once and in order; True if the token ends the row's output."""


def endless(token: int) -> bool:
    """`Ends` of an output without an end."""
    return False


@dataclass(frozen=True, eq=False)
class Acceptance:
    """Result of verifying a batch of trees, on the CPU.

    Attributes:
        path: (B, A) int64 accepted node indices, root first, padded with -1; empty for a row whose
            first token could not be chosen.
        num_accepted: (B,) int64 accepted drafts, without the root.
        next_token: (B,) int64 the target's own token after the last accepted node.
        ended: per row, whether `next_token` ends the output.
        errors: per row, the exception that the choice of the token after `next_token` raised, or None.
    """

    path: Tensor
    num_accepted: Tensor
    next_token: Tensor
    ended: Sequence[bool]
    errors: Sequence[Exception | None]


@dataclass(eq=False)
class Walk:
    """One row's way down its tree.

    Attributes:
        path: accepted nodes, root first.
        next_token: the token after them.
        ended: `next_token` ends the output.
        error: what the row's own chooser raised. The tokens chosen before it stay: the last of them is
            `next_token`; if there are none, the path is empty.
    """

    path: list[int] = field(default_factory=lambda: [0])
    next_token: int = -1
    ended: bool = False
    error: Exception | None = None


Move = Callable[[int, Sequence[int]], tuple[int | None, int]]
"""(node, tokens below the root down to it) → (the child entered, or None; the chosen token)."""


def walk(move: Move, ends: Ends) -> Walk:
    """Follows `move` from the root until it leaves the tree, the output ends, or `move` raises."""
    found, taken = Walk(), list[int]()
    try:
        while found.next_token < 0:
            child, token = move(found.path[-1], taken)
            found.ended = ends(token)
            if child is None or found.ended:
                found.next_token = token
            else:
                found.path.append(child)
                taken.append(token)
    except Exception as error:  # noqa: BLE001 - a user's processor may raise anything; other rows go through
        found.error = error
        found.next_token = taken[-1] if taken else 0
        found.path.pop()
    return found


def pack(walks: Sequence[Walk]) -> Acceptance:
    """Builds an `Acceptance` from the rows' walks."""
    width = max(1, *(len(found.path) for found in walks))
    padded = [[*found.path, *[-1] * (width - len(found.path))] for found in walks]
    return Acceptance(
        path=torch.tensor(padded, dtype=torch.int64),
        num_accepted=torch.tensor([max(len(found.path) - 1, 0) for found in walks], dtype=torch.int64),
        next_token=torch.tensor([found.next_token for found in walks], dtype=torch.int64),
        ended=[found.ended for found in walks],
        errors=[found.error for found in walks],
    )


def accept(
    tree: DraftTree,
    logits: Tensor,
    choosers: Sequence[TokenChooser],
    prefixes: Sequence[Sequence[int]],
    ends: Sequence[Ends] | None = None,
) -> Acceptance:
    """Walks each tree with the target's own tokens; exact for every tree that was not sampled.

    At the root, take the target's token (the arg-max or the seeded draw). While it is a child, move
    there and take the next. This is reject-and-renormalise with q = 1: a child is entered with exactly
    the target's probability; otherwise the drawn token has the target's distribution given that no
    child was hit. No residual is needed, and output position t uses the same draw as plain decoding.

    Args:
        tree: B trees built without randomness.
        logits: (B, N, V) target logits at every node.
        choosers: B choosers.
        prefixes: B token sequences up to and including the root.
        ends: B judges of the emitted tokens; None: no output ends.

    Source: EAGLE-2's verification in the reference code; differs: one draw per node, not one per child.
    """
    children = _children(tree)
    # One arg-max for the batch; rows with processors or a temperature choose node by node.
    greedy = _best(logits) if any(c.params.plain_greedy for c in choosers) else None
    walks = []
    for row, chooser in enumerate(choosers):
        if chooser.params.plain_greedy:
            assert greedy is not None
            choose = _known_choice(greedy[row])
        else:
            choose = _lazy_choice(chooser, logits[row], prefixes[row])
        walks.append(walk(_to_child(children[row], choose), ends[row] if ends else endless))
    return pack(walks)


def _best(logits: Tensor) -> list[list[int]]:
    """Returns the arg-max at every node, or -1 for NaN."""
    if logits.device.type == "cpu":
        # NumPy vectorises it: a twentieth of PyTorch's time. NaN counts as the largest in both.
        values = logits.detach().numpy()
        found = values.argmax(-1)
        chosen = np.take_along_axis(values, found[..., None], -1)[..., 0]
        return np.where(np.isnan(chosen), -1, found).tolist()  # type: ignore[no-any-return]
    best = logits.argmax(-1, keepdim=True)
    rows: list[list[int]] = best.masked_fill(logits.gather(-1, best).isnan(), -1)[..., 0].tolist()
    return rows


_Choice = Callable[[int, Sequence[int]], int]


def _known_choice(best: Sequence[int]) -> _Choice:
    def choose(node: int, taken: Sequence[int]) -> int:
        if best[node] < 0:
            raise ValueError(NOT_A_NUMBER)
        return best[node]

    return choose


def _lazy_choice(chooser: TokenChooser, logits: Tensor, prefix: Sequence[int]) -> _Choice:
    def choose(node: int, taken: Sequence[int]) -> int:
        return chooser(logits[node], [*prefix, *taken])

    return choose


def _children(tree: DraftTree) -> list[dict[tuple[int, int], int]]:
    """Returns, per row, (parent, token) → node for all candidates."""
    limits = tree.num_nodes if tree.num_candidates is None else tree.num_candidates
    result = []
    for tokens, parents, limit in zip(tree.tokens.tolist(), tree.parents.tolist(), limits.tolist(), strict=True):
        result.append({(parents[i], tokens[i]): i for i in range(limit - 1, 0, -1)})
    return result


def _to_child(children: dict[tuple[int, int], int], choose: _Choice) -> Move:
    def move(node: int, taken: Sequence[int]) -> tuple[int | None, int]:
        token = choose(node, taken)
        return children.get((node, token)), token

    return move


def accept_sampled(
    tree: DraftTree,
    logits: Tensor,
    choosers: Sequence[TokenChooser],
    prefixes: Sequence[Sequence[int]],
    generator: torch.Generator,
    ends: Sequence[Ends] | None = None,
) -> Acceptance:
    """Multi-round speculative sampling for trees whose children were *drawn* from the draft.

    At a node, p is the target's distribution and q the draft's. Children are tried in the order in
    which they were drawn without replacement. Child x is accepted with probability
    min(1, p(x) / q(x)); on rejection, p ← norm(max(0, p − q)), and q is renormalised without x. If all
    are rejected, the token is drawn from the final p. The result has exactly the target's
    distribution.

    Args:
        tree: B trees with `draft_probs`; siblings in drawing order by node index.
        logits: (B, N, V).
        choosers: B choosers; at temperature 0 the target's arg-max has probability 1.
        prefixes: B token sequences up to and including the root.
        generator: source of the uniform draws.
        ends: as for `accept`.

    Source: EAGLE (arXiv 2401.15077) Algorithm 1; SpecInfer (arXiv 2305.09781).
    """
    assert tree.draft_probs is not None, "accept_sampled needs the draft's distributions"
    laws, candidates = tree.draft_probs, _candidates(tree)

    def mover(row: int, chooser: TokenChooser) -> Move:
        def move(node: int, taken: Sequence[int]) -> tuple[int | None, int]:
            below = candidates(row, node)
            p = _law(chooser, logits[row, node], [*prefixes[row], *taken])
            entered, p = _rounds([token for _, token in below], p, laws[row, node].cpu().double(), generator)
            if entered is None:
                return None, int(torch.multinomial(p, 1, generator=generator))
            return below[entered]

        return move

    walks = [walk(mover(row, c), ends[row] if ends else endless) for row, c in enumerate(choosers)]
    return pack(walks)


def _candidates(tree: DraftTree) -> Callable[[int, int], list[tuple[int, int]]]:
    """Returns (row, node) → (child, token) of the children that may be accepted, in order."""
    limits = tree.num_nodes if tree.num_candidates is None else tree.num_candidates
    tokens, parents, counts = tree.tokens.tolist(), tree.parents.tolist(), limits.tolist()
    return lambda row, node: [(i, tokens[row][i]) for i in range(1, counts[row]) if parents[row][i] == node]


def _law(chooser: TokenChooser, logits: Tensor, prefix: Sequence[int]) -> Tensor:
    """Returns the (V,) float64 distribution of the target's token, on the CPU; one-hot at temperature 0.

    A visited node is copied once: the rounds read single numbers, and MPS has no float64.
    """
    if chooser.params.temperature > 0:
        return chooser.probabilities(logits, prefix).cpu().double()
    certain = torch.zeros(logits.shape, dtype=torch.float64)
    certain[chooser(logits, prefix)] = 1
    return certain


def _rounds(candidates: Sequence[int], p: Tensor, q: Tensor, generator: torch.Generator) -> tuple[int | None, Tensor]:
    """Tries the siblings in order; returns (index of the accepted one or None, the remaining p)."""
    for i, token in enumerate(candidates):
        uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
        if uniform * float(q[token]) < float(p[token]):
            return i, p
        left = (p - q).clamp_(min=0)
        total = left.sum()
        if float(total) <= 0:
            # p equals q up to rounding, so a rejection had probability 0: keep p as the distribution.
            return None, p
        p = left / total
        q = q.clone()
        q[token] = 0
        q = q / q.sum().clamp(min=torch.finfo(q.dtype).tiny)
    return None, p


@dataclass(frozen=True)
class LossyRule:
    """An opt-in acceptance rule that CHANGES the output distribution.

    Attributes:
        kind: "threshold" (SGLang's two thresholds) or "typical" (Medusa's).
        single: for threshold: accept a child with at least this target probability, in (0, 1].
        accumulated: for threshold: divisor of the accumulated probability in the coin test, in (0, 1].
        epsilon: for typical: upper bound of the acceptance threshold.
        delta: for typical: factor on exp(-entropy).
    """

    kind: str
    single: float = 1.0
    accumulated: float = 1.0
    epsilon: float = 0.3
    delta: float = 0.09

    def __post_init__(self) -> None:
        if self.kind not in ("threshold", "typical"):
            raise ValueError(f"lossy rule {self.kind!r} is not known; allowed: threshold, typical")
        for name in ("single", "accumulated", "epsilon", "delta"):
            value = number(name, getattr(self, name))
            check_value(name, value, 0 < value <= 1, "in (0, 1]")

    @property
    def exact(self) -> bool:
        """True for thresholds of 1, which have no effect."""
        return self.kind == "threshold" and self.single == 1 and self.accumulated == 1


def check_lossy(rule: LossyRule, temperature: float) -> None:
    """Raises ValueError where a rule has nothing to relax: at temperature 0, unless it is exact."""
    if temperature == 0 and not rule.exact:
        raise ValueError(
            "temperature is 0, but lossy acceptance needs temperature > 0; remove the lossy rule for greedy output"
        )


def accept_lossy(
    tree: DraftTree,
    logits: Tensor,
    choosers: Sequence[TokenChooser],
    prefixes: Sequence[Sequence[int]],
    rule: LossyRule,
    ends: Sequence[Ends] | None = None,
) -> Acceptance:
    """Accepts more drafts than the target's distribution does, which changes the output distribution.

    Threshold: draws one coin per node and tries the children in order. A child is accepted if the
    target probability accumulated over them, divided by `accumulated`, reaches the coin, or its own
    probability reaches `single`; otherwise the token is drawn from p without the tried children.
    Typical: a child is accepted if its probability is at least min(epsilon, delta · exp(−entropy)),
    the likeliest first; the token after the path is the target's own.

    Raises:
        ValueError: at temperature 0, where the rules have no effect.

    Source: SGLang's `tree_speculative_sampling_target_only`; Medusa (arXiv 2401.10774 §2.3.1).
    """
    if rule.exact:
        return accept(tree, logits, choosers, prefixes, ends)
    for chooser in choosers:
        check_lossy(rule, chooser.params.temperature)
    candidates = _candidates(tree)
    enter = _enter_threshold if rule.kind == "threshold" else _enter_typical

    def mover(row: int, chooser: TokenChooser) -> Move:
        def move(node: int, taken: Sequence[int]) -> tuple[int | None, int]:
            prefix, below = [*prefixes[row], *taken], candidates(row, node)
            position = len(prefix) - chooser.prompt_length
            probs = chooser.probabilities(logits[row, node], prefix)
            child, left = enter(probs, below, rule, uniform(chooser.seed, position))
            return child, draw(left, chooser.seed, position) if child is None else dict(below)[child]

        return move

    walks = [walk(mover(row, c), ends[row] if ends else endless) for row, c in enumerate(choosers)]
    return pack(walks)


def _enter_threshold(
    probs: Tensor, below: Sequence[tuple[int, int]], rule: LossyRule, coin: float
) -> tuple[int | None, Tensor]:
    accumulated, left = 0.0, probs.clone()
    for node, token in below:
        accumulated += float(probs[token])
        if coin < accumulated / rule.accumulated or float(probs[token]) >= rule.single:
            return node, probs
        left[token] = 0
    # Rounding alone rejected all of p: keep p as the distribution.
    return None, left if float(left.sum()) > 0 else probs


def _enter_typical(
    probs: Tensor, below: Sequence[tuple[int, int]], rule: LossyRule, coin: float
) -> tuple[int | None, Tensor]:
    entropy = -(probs * probs.clamp(min=torch.finfo(probs.dtype).tiny).log()).sum()
    threshold = min(rule.epsilon, rule.delta * float(torch.exp(-entropy)))
    allowed = [(float(probs[token]), -node) for node, token in below if float(probs[token]) >= threshold]
    return (-max(allowed)[1] if allowed else None), probs
