"""Sampled drafts: the law of the output is the target's, enumerated and through the loop."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from aquiline import decode, verify
from aquiline.cache import copy_prefix
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.sampled import draft_laws, draw_children, pack_drawn
from aquiline.drafters.small_model import SmallModel
from aquiline.drafters.trees import Chain, DynamicTree, StaticTree
from aquiline.sampling import SamplingParams
from aquiline.stats import GenerationStats
from aquiline.targets.target import TargetInput
from tests import tiny
from tests.drafters.loop import Validating, noisy, run, tiny_target

TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


def goodness(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """p-value of Pearson's chi-square; outcomes with fewer than 5 expected go into one bin."""
    expected = probs * counts.sum()
    common = expected >= 5
    seen = torch.cat((counts[common], counts[~common].sum()[None])).double()
    wanted = torch.cat((expected[common], expected[~common].sum()[None]))
    keep = wanted > 1e-9
    assert seen[~keep].sum() == 0, "an outcome of probability 0 occurred"
    statistic = ((seen - wanted)[keep] ** 2 / wanted[keep]).sum()
    freedom = torch.tensor((int(keep.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def round_law(candidates, p, q, monkeypatch):
    """Acceptance probability of each round and what is left of p, found by bisecting the coin."""
    coins: list[float] = []
    monkeypatch.setattr(
        verify.torch,
        "rand",
        lambda *a, **k: torch.tensor(coins[len(used) - 1], dtype=torch.float64) if not used.append(0) else None,
    )
    used: list[int] = []

    def outcome(values):
        coins[:] = values
        used.clear()
        return verify.rounds(candidates, p, q, torch.Generator())

    refuse, thresholds = [1 - 1e-15] * len(candidates), []
    for i in range(len(candidates)):
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            values = [*refuse[:i], middle, *refuse[i + 1 :]]
            low, high = (middle, high) if outcome(values)[0] == i else (low, middle)
        thresholds.append(low)
    return thresholds, outcome(refuse)[1]


@pytest.mark.parametrize("children", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_enumerated_law_is_the_targets(children, seed, monkeypatch):
    """Over all draws of the children and all outcomes of the coins, P(token) = p(token)."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.rand(4, generator=generator, dtype=torch.float64) ** 3 for _ in range(2))
    if seed == 3:
        p[1], q[2] = 0, 0  # supports that differ
    p, q = p / p.sum(), q / q.sum()
    law = torch.zeros(4, dtype=torch.float64)
    for drawn in itertools.permutations(range(4), children):
        probability, left = 1.0, 1.0
        for token in drawn:
            probability *= float(q[token]) / left if q[token] > 0 else 0.0
            left -= float(q[token])
        if probability <= 0:
            continue
        thresholds, rest = round_law(drawn, p, q, monkeypatch)
        for token, threshold in zip(drawn, thresholds, strict=True):
            law[token] += probability * threshold
            probability *= 1 - threshold
        law += probability * rest
    torch.testing.assert_close(law, p, atol=1e-9, rtol=0)


def test_children_are_drawn_without_replacement():
    """Pairs of the drawing order follow q(x) q(y) / (1 − q(x)); false alarm 1e-4 by the bound."""
    q = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    tokens, valid = draw_children(q.expand(1, 20_000, 5), 2, torch.Generator().manual_seed(0))
    assert bool(valid.all())
    counts = torch.bincount(tokens[0, :, 0] * 5 + tokens[0, :, 1], minlength=25)
    expected = q[:, None] * q[None] / (1 - q[:, None])
    expected.fill_diagonal_(0)
    assert goodness(counts, expected.flatten().double()) > 1e-4
    assert goodness(counts, (q[:, None] * q[None]).flatten().double() / 1 + 1e-6) < 1e-9


def test_an_exhausted_support_drops_children_and_their_descendants():
    laws = torch.tensor([[[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]]])
    tokens, valid = draw_children(laws, 3, torch.Generator().manual_seed(0))
    assert valid.tolist() == [[[True, False, False], [True, True, False]]]
    assert tokens[0, 0, 0] == 1
    tree = pack_drawn(
        torch.tensor([[9, 1, 2, 4, 5]]), [-1, 0, 0, 1, 2], torch.tensor([[True, True, False, True, True]]),
        torch.arange(5.0)[None, :, None].expand(1, 5, 3),
    )  # fmt: skip
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([[9, 1, 4]], [[-1, 0, 1]])
    assert tree.draft_probs[0, :, 0].tolist() == [0, 1, 3]


def test_the_draft_uses_the_requests_processing():
    logits = torch.tensor([[[2.0, 1.0, 0.0, -1.0]], [[2.0, 1.0, 0.0, -1.0]], [[2.0, 1.0, 0.0, -1.0]]])
    params = [
        SamplingParams(temperature=0.5, top_k=2),
        SamplingParams(),
        SamplingParams(temperature=1, logit_bias={0: -1e9}, logits_processors=(lambda ids, s: s * torch.nan,)),
    ]
    laws = draft_laws(logits, [tiny.chooser([1], p) for p in params], [[[1]]] * 3)[:, 0]
    torch.testing.assert_close(laws[0], torch.softmax(torch.tensor([4.0, 2.0, -torch.inf, -torch.inf]), 0))
    assert laws[1].tolist() == [1, 0, 0, 0]
    assert laws[2, 0] == 0
    assert float(laws[2].sum()) == pytest.approx(1)
    assert draft_laws(logits.fill_(-torch.inf), [tiny.chooser([1], params[0])] * 3, [[[1]]] * 3).sum() == 0


def outcomes(target, drafter, prompt, params, count, length, rows=50, seed=0):
    """(count, length) tokens that the loop emits after `prompt`, over and over, `rows` at a time."""
    state = decode.new_state(target, drafter, rows, 32)
    state.generator.manual_seed(seed)
    result = []
    for batch in range(count // rows):
        for row in range(rows):
            decode.free(drafter, state, row)
        first = decode.Occupant(prompt[:-1], tiny.chooser(prompt, params), GenerationStats())
        list(decode.prefill(target, drafter, state, 0, first))
        for row in range(rows):
            if row:
                copy_prefix(state.cache, 0, row, len(prompt) - 1)
                if hasattr(state.drafter_state, "pending"):
                    (piece,) = state.drafter_state.pending[0]
                    state.drafter_state.pending[row] = [piece]
            chooser = tiny.chooser(prompt, params, seed=batch * rows + row)
            state.occupants[row] = decode.Occupant(list(prompt), chooser, GenerationStats())
        if hasattr(state.drafter_state, "pending"):  # the token after the prompt's end was drawn; put ours
            for row in range(rows):
                ((tokens, features),) = state.drafter_state.pending[row]
                state.drafter_state.pending[row] = [([*tokens[:-1], prompt[-1]], features)]
        active = list(range(rows))
        while active:
            decode.step(target, drafter, state, active)
            active = [row for row in active if len(state.occupants[row].tokens) < len(prompt) + length]
        result += [state.occupants[row].tokens[len(prompt) :][:length] for row in range(rows)]
    accepted = sum(state.occupants[row].stats.accepted for row in range(rows))
    offered = sum(sum(state.occupants[row].stats.offered_at) for row in range(rows))
    assert 0 < accepted < offered
    return torch.tensor(result)


def exact_law(target, prompt, params, length):
    """Probability of each continuation, (V,) * length, from plain forwards."""
    vocab = target.shape.vocab_size
    law = torch.zeros((vocab,) * length, dtype=torch.float64)
    chooser = tiny.chooser(prompt, params)
    for path in itertools.product(range(vocab), repeat=length):
        text, probability = list(prompt), 1.0
        for token in path:
            probability *= float(_next(target, chooser, tuple(text))[token])
            text.append(token)
        law[path] = probability
    return law


_known: dict = {}


def _next(target, chooser, text):
    key = (id(target), chooser.params.temperature, text)
    if key not in _known:
        ids = torch.tensor([text])
        cache = target.new_cache(1, len(text))
        out = target.forward(TargetInput(ids, torch.arange(len(text))[None], None, cache, [0]))
        _known[key] = chooser.probabilities(out.logits[0, -1], text)
    return _known[key]


@pytest.fixture(scope="module")
def small_vocabulary():
    """A target of 4 tokens whose continuations are not near certain."""
    return tiny_target(4, scale=0.16, layers=4)


def eagle_head(vocab=4, drafted=(0, 2, 3)):
    head = tiny.head("eagle3", vocab_size=vocab, draft_vocab_size=len(drafted))
    return replace(head, draft_to_target=torch.tensor(drafted))


DRAFTERS = {
    "small model, chain": lambda t: SmallModel(noisy(t, 0.02), t, Chain(2), sampled=True),
    "EAGLE-3, chain": lambda t: EagleDrafter(eagle_head(), t, Chain(2), sampled=True),
    "EAGLE-3, tree": lambda t: EagleDrafter(eagle_head(), t, TREE, sampled=True),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_loops_law_is_the_targets(small_vocabulary, name):
    """Seeded chi-square over 64 outcomes of 3 tokens: p > 1e-4, so it fails for one seed in
    10 000 if the law is right; another temperature's law is refused by the same samples."""
    # All four tokens are in the prompt, so only a penalty that counts the output differs along a path.
    params = SamplingParams(temperature=1.2, top_p=0.97, repetition_penalty=1.2, frequency_penalty=1.5)
    prompt = [1, 3, 0, 2]
    tokens = outcomes(small_vocabulary, DRAFTERS[name](small_vocabulary), prompt, params, 1000, 3)
    counts = torch.bincount((tokens * torch.tensor([16, 4, 1])).sum(1), minlength=64)
    law = exact_law(small_vocabulary, prompt, params, 3).flatten()
    assert float(law.sum()) == pytest.approx(1)
    assert goodness(counts, law) > 1e-4
    other = exact_law(small_vocabulary, prompt, replace(params, temperature=0.6, top_p=1.0), 3).flatten()
    assert goodness(counts, other) < 1e-6


@pytest.mark.parametrize("name", ["EAGLE-3, tree", "small model, chain"])
def test_equals_plain_at_temperature_zero_beside_rows_that_sample(name):
    """B = 3 with one greedy row: that row is plain decoding token for token."""
    target = tiny_target(4, scale=0.16, layers=4)
    drafter = DRAFTERS[name](target)
    params = [SamplingParams(temperature=1), SamplingParams(), SamplingParams(temperature=0.7)]
    prompts, budgets = [[1, 2], [3, 0, 1], [2]], [20, 25, 15]
    expected, _ = run(target, None, prompts, budgets, mixed=params)
    found, stats = run(target, drafter, prompts, budgets, mixed=params)
    assert found[1] == expected[1]
    assert [len(tokens) for tokens in found] == budgets
    assert 0 < stats.accepted < sum(stats.offered_at)
    greedy, _ = run(target, drafter, prompts, budgets, SamplingParams())
    assert greedy == run(target, None, prompts, budgets, SamplingParams())[0]


def test_sampled_trees_are_valid_and_their_children_have_probability():
    target = tiny_target(4, scale=0.16, layers=4)
    drafter = Validating(EagleDrafter(eagle_head(), target, TREE, sampled=True))
    run(target, drafter, [[1, 2], [3, 3, 1]], [12, 9], SamplingParams(temperature=1, top_p=0.6))
    seen = drafter.seen
    for tree in seen:
        assert tree.draft_probs is not None
        for row, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
            for node in range(1, int(tree.num_nodes[row])):
                assert float(tree.draft_probs[row, parents[node], tokens[node]]) > 0
    assert len({n for tree in seen for n in tree.num_nodes.tolist()}) > 2, "no node was ever dropped"


@pytest.mark.parametrize("policy", [DynamicTree(), StaticTree(((0,), (2,)))])
def test_refuses_trees_whose_shape_would_bias_the_law(policy):
    with pytest.raises(ValueError, match=r"chain or a static tree|need \(1,\) in the tree before \(2,\)"):
        EagleDrafter(eagle_head(), tiny_target(4), policy, sampled=True)
