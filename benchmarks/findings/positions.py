"""Does a draft's place in the tree say whether it is accepted, or does the context?"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from aquiline.bench.metrics import BINS
from aquiline.bench.recorder import Node


def position_profile(nodes: Sequence[Node]) -> dict[str, Any]:
    """Acceptance by place and by confidence, and how much of its variance each explains.

    EAGLE-2's observation is that acceptance depends on the context beside the position. The
    draft's confidence is what it uses to see the context, so the variance that confidence
    explains beyond the position is the room for a dynamic tree.

    Args:
        nodes: judged nodes of a static tree, with confidences.

    Returns:
        ``positions``: "0.2" (third child of the first child) → [judged, accepted]; ``within``: the
        same places → acceptance of their least and most confident thirds; ``explained``: share of
        the variance of acceptance (0 … 1) explained by the position, by the confidence (20 bins),
        and by both.
    """
    judged = [node for node in nodes if node.confidence is not None]
    places: dict[str, list[Node]] = {}
    for node in judged:
        places.setdefault(".".join(map(str, node.ranks)), []).append(node)
    ordered = sorted(places.items(), key=lambda item: (item[0].count("."), item[0]))
    return {
        "positions": {place: [len(at), sum(n.accepted for n in at)] for place, at in ordered},
        "within": {place: _thirds(at) for place, at in ordered if len(at) >= 30},
        "explained": {
            "position": explained((n.ranks, n.accepted) for n in judged),
            "confidence": explained((_bin(n), n.accepted) for n in judged),
            "both": explained(((n.ranks, _bin(n)), n.accepted) for n in judged),
        },
    }


def explained(pairs: Iterable[tuple[Hashable, bool]]) -> float:
    """Share of the variance of a yes/no outcome that lies between groups: η² in 0 … 1."""
    groups: dict[Hashable, list[bool]] = {}
    for group, outcome in pairs:
        groups.setdefault(group, []).append(outcome)
    total = sum(map(len, groups.values()))
    mean = sum(map(sum, groups.values())) / total if total else 0.0
    variance = mean * (1 - mean)
    if variance == 0:
        return 0.0
    between = sum(len(g) * (sum(g) / len(g) - mean) ** 2 for g in groups.values()) / total
    return between / variance


def _bin(node: Node) -> int:
    assert node.confidence is not None
    return min(int(node.confidence * BINS), BINS - 1)


def _thirds(nodes: Sequence[Node]) -> list[float]:
    ordered = sorted(nodes, key=lambda node: node.confidence or 0.0)
    size = len(ordered) // 3
    return [sum(n.accepted for n in part) / size for part in (ordered[:size], ordered[-size:])]
