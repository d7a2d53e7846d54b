"""Verification: finds the drafted nodes that the target accepts, and the token after them.

A node is *accepted* if the emitted text contains it; `next_token` is the target's own token after the
last accepted node. A step emits the accepted nodes and the next token. A token that ends the output
is always a next token, whether it was drafted or not: nothing after it is chosen, counted or committed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from aquiline.race import NOT_A_NUMBER, draw, uniform
from aquiline.sampling import LossyRule, TokenChooser, check_lossy
from aquiline.tree import DraftTree

Ends = Callable[[int], bool]
"""Receives a row's emitted tokens, each once and in order; True if the token ends the row's output."""


def endless(token: int) -> bool:
    """`Ends` of an output without an end."""
    return False


@dataclass(eq=False)
class Acceptance:
    """One row's way down its tree.

    Attributes:
        path: accepted nodes, root first; empty if the first token could not be chosen.
        next_token: the target's own token after them.
        ended: `next_token` ends the output.
        error: what the row's own chooser raised. The tokens chosen before it stay: the last of them is `next_token`.
    """

    path: list[int] = field(default_factory=lambda: [0])
    next_token: int = -1
    ended: bool = False
    error: Exception | None = None


Move = Callable[[int, Sequence[int]], tuple[int | None, int]]
"""(node, tokens below the root down to it) → (the child entered, or None; the chosen token)."""


def walk(move: Move, ends: Ends) -> Acceptance:
    """Follows `move` from the root until it leaves the tree, the output ends, or `move` raises."""
    found, taken = Acceptance(), list[int]()
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


def _walked(
    mover: Callable[[int, TokenChooser], Move], choosers: Sequence[TokenChooser], ends: Sequence[Ends] | None
) -> list[Acceptance]:
    """Walks each row's tree with the moves that `mover` makes for the row."""
    return [walk(mover(row, chooser), ends[row] if ends else endless) for row, chooser in enumerate(choosers)]


def accept(
    tree: DraftTree,
    logits: Tensor,
    choosers: Sequence[TokenChooser],
    prefixes: Sequence[Sequence[int]],
    ends: Sequence[Ends] | None = None,
    best: Tensor | None = None,
) -> list[Acceptance]:
    """Walks each tree with the target's own tokens; exact for every tree that was not sampled.

    At the root, take the target's token (the arg-max or the seeded draw). While it is a child, move
    there and take the next. This is reject-and-renormalise with q = 1: a child is entered with exactly
    the target's probability; otherwise the drawn token has the target's distribution given that no
    child was hit. No residual is needed, and output position t uses the same draw as plain decoding.

    Args:
        tree: B trees built without randomness.
        logits, best: (B, N, V) target logits at every node, and (B, N) their arg-max, -1 for NaN, where it is known.
        choosers: B choosers.
        prefixes: B token sequences up to and including the root.
        ends: B judges of the emitted tokens; None: no output ends.

    Source: EAGLE-2's verification in the reference code; differs: one draw per node, not one per child.
    """
    below = _below(tree)
    # Rows with processors or a temperature choose with their own chooser.
    found = best.tolist() if best is not None else _best(logits) if any(c.params.plain_greedy for c in choosers) else []

    def mover(row: int, chooser: TokenChooser) -> Move:
        own = found[row] if chooser.params.plain_greedy else None

        def move(node: int, taken: Sequence[int]) -> tuple[int | None, int]:
            token = chooser(logits[row, node], [*prefixes[row], *taken]) if own is None else own[node]
            if token < 0:
                raise ValueError(NOT_A_NUMBER)
            return next((child for child, drafted in below[row][node] if drafted == token), None), token

        return move

    return _walked(mover, choosers, ends)


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


def _below(tree: DraftTree) -> list[defaultdict[int, list[tuple[int, int]]]]:
    """Returns, per row, node → (child, its token) of the children that may be accepted, in order."""
    limits = tree.num_nodes if tree.num_candidates is None else tree.num_candidates
    result = []
    for tokens, parents, limit in zip(tree.tokens.tolist(), tree.parents.tolist(), limits.tolist(), strict=True):
        below: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for node in range(1, limit):
            below[parents[node]].append((node, tokens[node]))
        result.append(below)
    return result


def accept_sampled(
    tree: DraftTree,
    logits: Tensor,
    choosers: Sequence[TokenChooser],
    prefixes: Sequence[Sequence[int]],
    generator: torch.Generator,
    ends: Sequence[Ends] | None = None,
) -> list[Acceptance]:
    """Multi-round speculative sampling for trees whose children were *drawn* from the draft.

    At a node, p is the target's distribution and q the draft's. Children are tried in the order in
    which they were drawn without replacement. Child x is accepted with probability
    min(1, p(x) / q(x)); on rejection, p ← norm(max(0, p − q)), and q is renormalised without x. If all
    are rejected, the token is drawn from the final p. The result has exactly the target's
    distribution.

    Args:
        tree: B trees with `draft_probs`; siblings in drawing order by node index.
        logits, choosers, prefixes, ends: as for `accept`; at temperature 0 the target's arg-max has probability 1.
        generator: source of the uniform draws.

    Source: EAGLE (arXiv 2401.15077) Algorithm 1; SpecInfer (arXiv 2305.09781).
    """
    assert tree.draft_probs is not None, "accept_sampled needs the draft's distributions"
    laws, below = tree.draft_probs, _below(tree)

    def mover(row: int, chooser: TokenChooser) -> Move:
        def move(node: int, taken: Sequence[int]) -> tuple[int | None, int]:
            children = below[row][node]
            p = _law(chooser, logits[row, node], [*prefixes[row], *taken])
            entered, p = rounds([token for _, token in children], p, laws[row, node].cpu().double(), generator)
            if entered is None:
                return None, int(torch.multinomial(p, 1, generator=generator))
            return children[entered]

        return move

    return _walked(mover, choosers, ends)


def _law(chooser: TokenChooser, logits: Tensor, prefix: Sequence[int]) -> Tensor:
    """Returns the (V,) float64 distribution of the target's token, on the CPU; one-hot at temperature 0.

    A visited node is copied once: the rounds read single numbers, and MPS has no float64.
    """
    if chooser.params.temperature > 0:
        return chooser.probabilities(logits, prefix).cpu().double()
    certain = torch.zeros(logits.shape, dtype=torch.float64)
    certain[chooser(logits, prefix)] = 1
    return certain


def rounds(candidates: Sequence[int], p: Tensor, q: Tensor, generator: torch.Generator) -> tuple[int | None, Tensor]:
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


def accept_lossy(
    tree: DraftTree,
    logits: Tensor,
    choosers: Sequence[TokenChooser],
    prefixes: Sequence[Sequence[int]],
    rule: LossyRule,
    ends: Sequence[Ends] | None = None,
) -> list[Acceptance]:
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
    below = _below(tree)
    enter = _enter_threshold if rule.kind == "threshold" else _enter_typical

    def mover(row: int, chooser: TokenChooser) -> Move:
        def move(node: int, taken: Sequence[int]) -> tuple[int | None, int]:
            prefix, children = [*prefixes[row], *taken], below[row][node]
            position = len(prefix) - chooser.prompt_length
            probs = chooser.probabilities(logits[row, node], prefix)
            child, left = enter(probs, children, rule, uniform(chooser.seed, position))
            return child, draw(left, chooser.seed, position) if child is None else dict(children)[child]

        return move

    return _walked(mover, choosers, ends)


def _enter_threshold(
    probs: Tensor, children: Sequence[tuple[int, int]], rule: LossyRule, coin: float
) -> tuple[int | None, Tensor]:
    accumulated, left = 0.0, probs.clone()
    for node, token in children:
        accumulated += float(probs[token])
        if coin < accumulated / rule.accumulated or float(probs[token]) >= rule.single:
            return node, probs
        left[token] = 0
    # Rounding alone rejected all of p: keep p as the distribution.
    return None, left if float(left.sum()) > 0 else probs


def _enter_typical(
    probs: Tensor, children: Sequence[tuple[int, int]], rule: LossyRule, coin: float
) -> tuple[int | None, Tensor]:
    entropy = -(probs * probs.clamp(min=torch.finfo(probs.dtype).tiny).log()).sum()
    threshold = min(rule.epsilon, rule.delta * float(torch.exp(-entropy)))
    allowed = [(float(probs[token]), -node) for node, token in children if float(probs[token]) >= threshold]
    return (-max(allowed)[1] if allowed else None), probs
