"""Acceptance rules against what their definitions say, on random trees, with settings that depend on the path."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aquiline.race import draw, uniform
from aquiline.sampling import LossyRule, SamplingParams, TokenChooser
from aquiline.tree import DraftTree, from_lists
from aquiline.verify import accept, accept_lossy, accept_sampled

VOCAB = 6
PROMPT = [1, 2]


def random_tree(rng: random.Random, nodes: int) -> DraftTree:
    tokens, parents = [rng.randrange(VOCAB)], [-1]
    while len(tokens) < nodes:
        parent, token = rng.randrange(len(tokens)), rng.randrange(VOCAB)
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return from_lists([(tokens, parents)])


def case(seed: int, params: SamplingParams) -> tuple[DraftTree, Tensor, TokenChooser, list[int]]:
    rng = random.Random(seed)
    tree = random_tree(rng, 14)
    logits = torch.randn(1, tree.size, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5
    prefix = [*PROMPT, 3, int(tree.tokens[0, 0])]
    return tree, logits, TokenChooser(params, seed, len(PROMPT)), prefix


def text_along(tree: DraftTree, prefix: list[int], path: list[int]) -> list[int]:
    return [*prefix, *(int(tree.tokens[0, node]) for node in path[1:])]


def children(tree: DraftTree, node: int) -> list[int]:
    return [i for i in range(1, tree.size) if int(tree.parents[0, i]) == node]


# Penalties and the draw's position change with every accepted token, so that a wrong prefix shows.
PATHWISE = SamplingParams(temperature=1.1, frequency_penalty=0.7, presence_penalty=0.4)


@pytest.mark.parametrize("params", [PATHWISE, SamplingParams(frequency_penalty=0.9), SamplingParams()], ids=str)
def test_exact_acceptance_is_plain_decoding_along_its_path(params: SamplingParams) -> None:
    lengths = set()
    for seed in range(60):
        tree, logits, chooser, prefix = case(seed, params)
        (found,) = accept(tree, logits, [chooser], [prefix])
        path = [0]
        while True:
            token = chooser(logits[0, path[-1]], text_along(tree, prefix, path))
            below = [i for i in children(tree, path[-1]) if int(tree.tokens[0, i]) == token]
            if not below:
                break
            path += below
        assert (found.path, found.next_token) == (path, token)
        lengths.add(len(path))
    assert lengths >= {1, 2, 3}


def lossy_path(
    tree: DraftTree, logits: Tensor, chooser: TokenChooser, prefix: list[int], rule: LossyRule
) -> tuple[list[int], int, int]:
    """As the rules are defined: the path, the token after it, and how often a rule took what was not drawn."""
    path, bent = [0], 0
    while True:
        text = text_along(tree, prefix, path)
        p, position = chooser.probabilities(logits[0, path[-1]], text), len(text) - len(PROMPT)
        below = [(i, float(p[tree.tokens[0, i]])) for i in children(tree, path[-1])]
        tried, chosen = 0.0, None
        if rule.kind == "threshold":
            for child, probability in below:
                tried += probability
                if probability >= rule.single or uniform(chooser.seed, position) < tried / rule.accumulated:
                    chosen = child
                    break
        else:
            entropy = -sum(float(x) * float(x.log()) for x in p if x > 0)
            least = min(rule.epsilon, rule.delta * float(torch.tensor(-entropy).exp()))
            allowed = [(probability, -child) for child, probability in below if probability >= least]
            chosen = -max(allowed)[1] if allowed else None
        if chosen is None:
            if rule.kind == "threshold":
                for child, _ in below:
                    p[tree.tokens[0, child]] = 0
            return path, draw(p, chooser.seed, position), bent
        bent += int(tree.tokens[0, chosen]) != chooser(logits[0, path[-1]], text)
        path.append(chosen)


@pytest.mark.parametrize(
    "rule",
    [
        LossyRule("threshold", single=0.35, accumulated=1.0),
        LossyRule("threshold", single=1.0, accumulated=0.6),
        LossyRule("threshold", single=0.5, accumulated=0.8),
        LossyRule("typical"),
        LossyRule("typical", epsilon=0.25, delta=0.9),
        LossyRule("typical", epsilon=0.9, delta=0.5),
    ],
    ids=str,
)
def test_lossy_rules_follow_their_definitions(rule: LossyRule) -> None:
    lengths, bent = set(), 0
    for seed in range(60):
        tree, logits, chooser, prefix = case(seed, PATHWISE)
        (found,) = accept_lossy(tree, logits, [chooser], [prefix], rule)
        path, token, more = lossy_path(tree, logits, chooser, prefix, rule)
        assert (found.path, found.next_token) == (path, token), seed
        lengths.add(len(path))
        bent += more
    assert len(lengths) > 1 and bent > 0, "the rule must have taken drafts that were not drawn"


def test_thresholds_of_one_change_nothing_and_no_other_thresholds_do() -> None:
    assert LossyRule("threshold").exact
    for rule in (LossyRule("threshold", single=0.9), LossyRule("threshold", accumulated=0.9), LossyRule("typical")):
        assert not rule.exact
    for seed in range(20):
        tree, logits, chooser, prefix = case(seed, PATHWISE)
        (exact,) = accept(tree, logits, [chooser], [prefix])
        (same,) = accept_lossy(tree, logits, [chooser], [prefix], LossyRule("threshold"))
        assert (exact.path, exact.next_token) == (same.path, same.next_token)


def test_the_coin_and_the_draw_are_independent() -> None:
    """Rejected by one coin, a token must not be the likelier one of the draw from what is left."""
    probs = torch.full((2,), 0.5)
    pairs = [(uniform(seed, t) < 0.5, draw(probs, seed, t)) for seed in range(40) for t in range(50)]
    both = sum(low and token == 0 for low, token in pairs)
    # Binomial with n = 2000 and p = 1/4: 5 standard deviations, a false alarm in two million.
    assert abs(both - 500) < 97
    assert abs(sum(low for low, _ in pairs) - 1000) < 112 and abs(sum(token for _, token in pairs) - 1000) < 112


def test_sampled_acceptance_processes_every_node_after_its_own_prefix() -> None:
    """A chain whose tokens have all of p and q, so that it is entered whatever the coins say."""
    seen: list[list[int]] = []

    def watch(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids[0].tolist())
        return scores

    chain = [3, 4, 5]
    logits = torch.full((1, 3, VOCAB), -1e9)
    for node, token in enumerate((4, 5, 0)):
        logits[0, node, token] = 0
    tree = replace(from_lists([(chain, [-1, 0, 1])]), draft_probs=logits.softmax(-1))
    prefix = [*PROMPT, 3]
    for params in (SamplingParams(temperature=0.8), SamplingParams()):
        seen.clear()
        chooser = TokenChooser(replace(params, logits_processors=(watch,)), 0, len(PROMPT))
        (found,) = accept_sampled(tree, logits, [chooser], [prefix], torch.Generator())
        assert (found.path, found.next_token) == ([0, 1, 2], 0)
        assert seen == [prefix, [*prefix, 4], [*prefix, 4, 5]]


def test_a_rule_of_the_wrong_type_is_named() -> None:
    with pytest.raises(TypeError, match="epsilon is 'x'; allowed: a number"):
        LossyRule("typical", epsilon="x")  # type: ignore[arg-type]
