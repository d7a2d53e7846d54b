"""Drafts that pay: the chosen nodes are within 2 % of the best fixed choice, on any machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import cycle
from random import Random

import pytest
import torch

from aquiline.drafters import adaptive
from aquiline.drafters.adaptive import Adaptive
from aquiline.drafters.calibration import Calibration, pick_nodes
from aquiline.drafters.drafter import Committed, Needs, Rows
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.filling import with_siblings
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.mixed import LookupFirst
from aquiline.drafters.prices import Costs, Prices
from aquiline.drafters.trees import Chain
from aquiline.sampling import SamplingParams, TokenChooser
from aquiline.targets.native import native
from aquiline.targets.target import Target
from aquiline.tree import DraftTree, from_lists, is_chain, to_lists
from tests import tiny
from tests.conftest import runs_kernels
from tests.drafters import taught
from tests.drafters.loop import Validating, assert_equal_to_plain, run

DEPTH, SIBLINGS = 8, 4

MACHINES = {
    "each node is dear": [1.0, 1.05, 1.17, 1.29, 1.52, 1.68, 2.12, 2.25, *(2.25 + 0.25 * i for i in range(1, 60))],
    "eight nodes are free": [*[1.0] * 8, *(1.0 + 0.1 * i for i in range(1, 60))],
    "many nodes are cheap": [1 + 0.02 * i for i in range(60)],
}
"""Seconds of a step by its tokens, from 1."""


@dataclass
class World:
    """Texts, drafts and a clock.

    Attributes:
        curve: seconds by number of tokens.
        level: seconds of drafting a level.
        truth: how much likelier (> 1) or less likely than it says a draft is.
        now: the clock.
    """

    curve: Sequence[float]
    level: float = 0.04
    confident: float = 1.0
    truth: float = 1.0
    noise: float = 0.0
    random: Random = field(default_factory=lambda: Random(1))
    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now

    def chances(self) -> list[list[float]]:
        """What a head says of its drafts, by level: the likeliest and its siblings."""
        found = []
        for _ in range(DEPTH):
            best = 0.9 * self.random.betavariate(1.0 * self.confident, 1.3)
            found.append([best, *((1 - best) * share for share in (0.35, 0.15, 0.1))])
        return found

    def answer(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """By level, the rank of the child that the target takes; -1: none of them."""
        found = []
        for level in chances:
            draw, rank = self.random.random(), 0
            while rank < SIBLINGS and draw >= min(level[rank] * self.truth, 1.0):
                draw -= min(level[rank] * self.truth, 1.0)
                rank += 1
            found.append(rank if rank < SIBLINGS else -1)
        return found

    def verify(self, tokens: int) -> float:
        seconds = self.curve[tokens - 1] * math.exp(self.random.gauss(0, self.noise))
        self.now += seconds
        return seconds


def accepted(tree: tuple[list[int], list[int]], answer: Sequence[int]) -> int:
    """Accepted drafts; a token's id is 10 · level + rank."""
    node = depth = 0
    tokens, parents = tree
    while depth < DEPTH and answer[depth] >= 0:
        wanted = 10 * (depth + 1) + answer[depth]
        found = [i for i, parent in enumerate(parents) if parent == node and tokens[i] == wanted]
        if not found:
            break
        node, depth = found[0], depth + 1
    return depth


def drafts(chances: Sequence[Sequence[float]], levels: int) -> DraftTree:
    tokens = [[10 * (depth + 1) + rank for rank in range(SIBLINGS)] for depth in range(levels)]
    above, scores = 0.0, []
    for level in chances[:levels]:
        scores.append([above + math.log(chance) for chance in level])
        above = scores[-1][0]
    return with_siblings([1], torch.tensor([tokens]), torch.tensor([scores]), 0.001)


class Head:
    """Drafts as an EAGLE head does, from `World.chances`."""

    needs = Needs()

    def __init__(self, world: World) -> None:
        self.world, self.offered = world, list[list[float]]()

    def new_state(self, slots: int, capacity: int) -> None:
        return None

    def propose(self, rows: Rows, state: None) -> DraftTree:
        assert rows.prices is not None
        floors = rows.prices.floors(1, DEPTH, self.world.level)
        levels, joint = 1, self.offered[0][0]
        while levels < DEPTH and joint >= floors[levels - 1]:
            joint *= self.offered[levels][0]
            levels += 1
        self.world.now += self.world.level * levels
        return drafts(self.offered, levels)

    def extend(self, committed: Committed, state: None) -> None:
        """Takes nothing in."""

    def copy(self, source: int, slot: int, length: int, state: None) -> None:
        """Keeps nothing."""

    def reset(self, slot: int, length: int, state: None) -> None:
        """Keeps nothing."""


def speed_of_prices(world: World, monkeypatch: pytest.MonkeyPatch, steps: int, measured: bool = True) -> float:
    """Tokens a second of the last two thirds of `steps`."""
    monkeypatch.setattr(adaptive, "time", world)
    head = Head(world)
    curve = [{"tokens": n, "seconds": world.curve[n - 1]} for n in (1, 2, 4, 8, 16)] if measured else []
    drafter = Adaptive(head, curve)
    state, chooser = drafter.new_state(1, 8), TokenChooser(SamplingParams(), 0, 1)
    tokens = seconds = 0.0
    for step in range(steps):
        if step == steps // 3:
            tokens, seconds = 0.0, -world.now
        head.offered = world.chances()
        text = [1]
        rows = Rows([0], [text], [chooser])
        tree, answer = drafter.propose(rows, state), world.answer(head.offered)
        count = accepted(to_lists(tree)[0], answer)
        text += [10 * (depth + 1) + answer[depth] for depth in range(count)] + [99]
        world.verify(tree.size)
        drafter.extend(Committed(rows, None, [count + 1], tree), state)
        tokens += count + 1
    return tokens / (seconds + world.now)


def best_fixed(world: World, steps: int) -> float:
    """The highest tokens a second of plain decoding, chains 1 to 7 and dynamic trees of 4 to 24 nodes."""
    totals: dict[tuple[int, int, int], list[float]] = {}
    options = [(depth, depth, 1) for depth in range(8)]
    options += [(nodes, depth, SIBLINGS) for nodes in (3, 5, 7, 11, 15, 23) for depth in (1, 2, 3, 4, 6)]
    for _ in range(steps):
        chances = world.chances()
        answer, whole = world.answer(chances), drafts(chances, DEPTH)
        assert whole.log_probs is not None
        scores, (tokens, _) = whole.log_probs[0].tolist(), to_lists(whole)[0]
        order = sorted(range(1, len(tokens)), key=lambda node: -scores[node])
        for nodes, depth, width in options:
            kept = [n for n in order if tokens[n] // 10 <= depth and tokens[n] % 10 < width][:nodes]
            spent = totals.setdefault((nodes, depth, width), [0.0, 0.0])
            tree = to_lists(pick_nodes(whole, [sorted(kept)]))[0] if kept else ([1], [-1])
            spent[0] += accepted(tree, answer) + 1
            spent[1] += world.curve[len(kept)] + world.level * depth
    return max(tokens / seconds for tokens, seconds in totals.values())


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("confident", [0.5, 1.5])
def test_prices_reach_the_best_fixed_choice(machine: str, confident: float, monkeypatch: pytest.MonkeyPatch) -> None:
    best = best_fixed(World(MACHINES[machine], confident=confident), 600)
    found = speed_of_prices(World(MACHINES[machine], confident=confident, noise=0.2), monkeypatch, 900)
    assert found >= 0.98 * best * math.exp(-0.02), "steps take e^0.02 longer with the noise"


def test_a_head_that_says_too_much_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    curve = MACHINES["each node is dear"]
    best = best_fixed(World(curve, truth=0.6), 600)
    assert speed_of_prices(World(curve, truth=0.6), monkeypatch, 900) >= 0.98 * best


def test_a_machine_that_was_not_measured_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a curve, costs begin as a line."""
    for curve in MACHINES.values():
        best = best_fixed(World(curve), 400)
        assert speed_of_prices(World(curve), monkeypatch, 900, measured=False) >= 0.95 * best


def test_costs_follow_the_machine_and_keep_their_shape() -> None:
    costs = Costs([{"tokens": 1, "seconds": 1.0}, {"tokens": 4, "seconds": 2.0}])
    for size in (1, 4, 1, 4) * 8:
        costs.record(size, 3 * (1.0 if size == 1 else 2.0))
    assert [costs.seconds(n) for n in (1, 4)] == pytest.approx([3, 6], rel=0.02)
    for size in (1, 1, 1, 4) * 80:
        costs.record(size, 1.0 if size == 1 else 1.5)
    assert costs.seconds(4) / costs.seconds(1) == pytest.approx(1.5, rel=0.05)


def test_rows_share_what_pays() -> None:
    """A node of every row is paid for; it is drafted if the rows' best candidates are worth it together."""
    costs = Costs([{"tokens": n, "seconds": 1 + 0.1 * (n - 1)} for n in (1, 2)])
    prices = Prices(1.0, costs, [0.5])
    assert prices.nodes([[0.3, 0.15], [0.05]]) == 1
    assert prices.nodes([[0.3, 0.15], [0.3, 0.15]]) == 2
    assert prices.nodes([[0.1], [0.05]]) == 0


def test_calibration_multiplies_by_what_was_accepted() -> None:
    calibration = Calibration()
    tree = from_lists([([1, 11], [-1, 0])], log_probs=[[0.0, math.log(0.8)]])
    chooser = TokenChooser(SamplingParams(), 0, 1)
    for i in range(200):
        text = [1, 11, 5] if i % 2 else [1, 5]
        rows = Rows([0], [text], [chooser])
        calibration.record(Committed(rows, None, [len(text) - 1], tree), "head")
    rows = Rows([0], [[1]], [chooser])
    assert calibration.chances(tree, rows, "head")[0] == pytest.approx([0.5], abs=0.05)
    assert calibration.chances(tree, rows, "lookup")[0] == pytest.approx([0.8])
    assert calibration.yields(False)[0] == pytest.approx(0.5, abs=0.05)
    assert calibration.yields(True)[0] == 0.5


def test_picked_nodes_keep_their_parents_scores_and_sources() -> None:
    tree = from_lists(
        [([1, 2, 3, 4], [-1, 0, 0, 2])], sources=[["head", "head", "lookup", "head"]], log_probs=[[0.0, -1, -2, -3]]
    )
    picked = pick_nodes(tree, [[2, 3]])
    assert to_lists(picked) == [([1, 3, 4], [-1, 0, 1])]
    assert picked.log_probs is not None and picked.log_probs.tolist() == [[0, -2, -3]]
    assert picked.sources == [["head", "lookup", "head"]]


class Ticking:
    """A clock of a machine where every draft takes 0.05 seconds and every verification 1."""

    def __init__(self) -> None:
        self.now, self.ticks = 0.0, cycle((0.0, 0.05, 1.0))

    def perf_counter(self) -> float:
        self.now += next(self.ticks)
        return self.now


needs_kernels = pytest.mark.skipif(not runs_kernels(), reason="no kernels were asked for")


@pytest.mark.oracle
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("slope", [0.001, 0.3])
def test_the_output_is_that_of_plain_decoding(
    slope: float, temperature: float, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an EAGLE head and prompt lookup, for one row and for three."""
    monkeypatch.setattr(adaptive, "time", Ticking())
    params = SamplingParams(temperature=temperature)
    teacher, prompts = tiny.decoder("llama"), tiny.prompts(3, seed=4, longest=20)
    target: Target = teacher
    if kernels:
        copy = native(deepcopy(teacher).to(torch.float32))
        assert copy is not None
        target = copy
    answers, _ = run(target, None, prompts, [40] * 3, params)
    head = taught.eagle_head("eagle3", teacher, list(zip(prompts, answers, strict=True)))
    curve = [{"tokens": n, "seconds": 1 + slope * (n - 1)} for n in (1, 2)]
    for rows in (1, 3):
        own = replace(head, network=deepcopy(head.network).to(target.dtype))
        eagle = EagleDrafter(own, target, Chain(4), packed=kernels)
        drafter = Validating(Adaptive(LookupFirst(PromptLookup(), eagle), curve))
        assert_equal_to_plain(target, drafter, prompts[:rows], params)
        branching = [tree for tree in drafter.seen if not is_chain(tree)]
        assert branching or slope > 0.1
